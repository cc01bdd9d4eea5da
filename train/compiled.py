"""Training passes on GPUs, compiled: the layers of the target, and what of a head its
`compiles` names. The operations between products become few kernels, one graph for all layers
and lengths. Target and head stay as they were made, for decoding and for everybody else.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outrider.conf.errors import first_line
from outrider.decode.probe import TOLERANCE
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.batch import Batch
from outrider.train.measure import is_no_memory


class Compiled:
    """What runs compiled inside `used`, until something of it fails: that and all later passes
    go the plain way, and `say` gets a line."""

    def __init__(
        self,
        head: Head,
        target: Target | None,
        device: torch.device | None,
        say: Callable[[str], Any],
        backend: Any = "inductor",
    ) -> None:
        """target: None where its features are read. device: nothing is compiled but for a GPU;
        None: nothing at all."""
        self._head, self._say, self._checked, self._on = head, say, False, False
        self._ways: list[tuple[Any, str, Any]] = []
        if device is None or device.type != "cuda":
            return
        layers, self._on = layers_of(target), True
        for owner, name in [*((layer, "forward") for layer in layers), *head.compiles()]:
            self._ways.append((owner, name, self._guarded(getattr(owner, name), backend)))
        for module in (m for layer in layers for m in layer.modules() if m is not layer):
            # transformers' own hooks, which list hidden states, would cut a graph in pieces
            if module._forward_hooks:
                self._ways.append((module, "_forward_hooks", OrderedDict()))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let a pass, forward and backward, run compiled."""
        ways = self._ways if self._on else []
        own = [vars(owner).get(name) for owner, name, _ in ways]
        for way in ways:
            setattr(*way)
        try:
            yield
        finally:
            for (owner, name, _), before in zip(ways, own, strict=True):
                delattr(owner, name)  # its class may have one
                if before is not None:
                    setattr(owner, name, before)

    def check(self, batch: Batch, target: Target) -> None:
        """Before the first pass: go the plain way from now on unless it has the loss and the
        gradients of the plain way."""
        if self._checked or not self._on:
            return
        self._checked, plain = True, self._gradients(batch, target)
        try:
            with self.used():
                found = self._gradients(batch, target)
        except Exception as error:  # of any compiler, or no memory for a second set of gradients
            return self._plain(error)
        if len(found) != len(plain):
            return self._plain("weights have no gradient")
        # Of all gradients together: in half precision a single small one is mostly rounding.
        sides = [(found[:1], plain[:1]), (found[1:], plain[1:])]
        apart = max(
            float(
                _norm([a - b for a, b in zip(*side, strict=True)]) / _norm(side[1]).clamp(min=1e-30)
            )
            for side in sides
        )
        if self._on and not apart <= TOLERANCE[target.dtype]:
            self._plain(f"loss or gradients differ by {apart:.2g}")

    def _gradients(self, batch: Batch, target: Target) -> list[Tensor]:
        """Return the loss of a pass, a token's, and what it gives every weight, which keeps
        none of it."""
        weights = [p for p in self._head.parameters() if p.requires_grad]
        device = batch.ids.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            out = self._head(batch, target)
            loss = out.sum / out.count.clamp(min=1)
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        return [loss.detach(), *(grad for grad in found if grad is not None)]

    def _guarded(self, plain: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        compiled = torch.compile(plain, backend=backend, dynamic=True)

        def way(*args: Any, **named: Any) -> Any:
            try:
                return compiled(*args, **named) if self._on else plain(*args, **named)
            except RuntimeError as error:  # such as a compiler's, for a shape that is new
                if is_no_memory(error):
                    raise
                self._plain(error)
            return plain(*args, **named)

        return way

    def _plain(self, why: object) -> None:
        if isinstance(why, Exception):
            why = first_line(getattr(why, "inner_exception", why))
        self._on = False
        self._say(f"compile: passes run as they are written, not compiled ({why})")


def _norm(parts: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(parts)


def layers_of(target: Target | None) -> list[nn.Module]:
    """Return the layers of a target that can be compiled, [] where they are not known or not
    as their class has them, and where they are spread over processes."""
    layers = [] if target is None or target.sharded else target.tapped_layers
    return [] if any("forward" in vars(layer) for layer in layers) else layers
