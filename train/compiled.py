"""The target's layers compiled for training passes: the operations between their products become
few kernels, one graph for all layers and lengths. The target itself stays as it was loaded, for
decoding and for everybody else.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import first_line
from outrider.decode.probe import TOLERANCE, difference
from outrider.decode.target import Target
from outrider.train.measure import is_no_memory

SHAPES = ((2, 24), (1, 40))  # of the passes that are compared first: one row has a graph of its own


class CompiledTarget:
    """A target whose layers run compiled in `features`, until a pass fails: that one and all later
    ones go the plain way, and `say` gets a line."""

    def __init__(
        self, target: Target, say: Callable[[str], Any], backend: Any = "inductor"
    ) -> None:
        self._target, self._say = target, say
        layers, compiled = target.tapped_layers, torch.compile
        self._ways = [(x, compiled(x.forward, backend=backend, dynamic=True)) for x in layers]
        # transformers' own hooks, which list hidden states, would cut a layer's graph in pieces
        self._hooked = [m for x in layers for m in x.modules() if m is not x and m._forward_hooks]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(self, ids: Tensor, mask: Tensor, taps: Sequence[int]) -> Tensor:
        """As Target.features."""
        try:
            with self._compiled():
                return self._target.features(ids, mask, taps)
        except Exception as error:  # of any compiler
            if not self._ways or is_no_memory(error):
                raise
            self._plain(first_line(getattr(error, "inner_exception", error)))
        return self._target.features(ids, mask, taps)

    def check(self) -> None:
        """Go the plain way from now on unless short passes give what the target gives."""
        target, ids = self._target, torch.arange(3, 51, device=self._target.device)
        for shape in SHAPES:
            some = ids.remainder(target.vocab_size)[: shape[0] * shape[1]].view(shape)
            given = some, torch.ones_like(some, dtype=torch.bool), range(target.num_layers + 1)
            error = difference(self.features(*given), target.features(*given))
            if error > TOLERANCE[target.dtype]:
                self._plain(f"compiled they differ by {error:.2g}")

    def _plain(self, why: str) -> None:
        self._ways, self._hooked = [], []
        self._say(f"target: its layers run as they were loaded, not compiled ({why})")

    @contextlib.contextmanager
    def _compiled(self) -> Iterator[None]:
        hooks = [(module, module._forward_hooks) for module in self._hooked]
        for module, _ in hooks:
            module._forward_hooks = OrderedDict()
        own = [vars(layer).get("forward") for layer, _ in self._ways]  # that of a hook
        for layer, way in self._ways:
            layer.forward = way
        try:
            yield
        finally:
            for (layer, _), forward in zip(self._ways, own, strict=True):
                del layer.forward
                vars(layer).update({"forward": forward} if forward else {})
            for module, those in hooks:
                module._forward_hooks = those


def passes_of(target: Target, device: torch.device, say: Callable[[str], Any]) -> Any:
    """Return what gives training passes their features: on a GPU a target whose layers are
    compiled, checked; elsewhere, where its layers are not known or not as their class has them,
    and where they are spread over processes, the target."""
    layers = target.tapped_layers if device.type == "cuda" and not target.sharded else []
    if not layers or any("forward" in vars(layer) for layer in layers):
        return target
    found = CompiledTarget(target, say)
    found.check()
    return found
