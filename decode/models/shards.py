"""A model whose stacked layers no process holds whole: while transformers loads it, every weight of
these layers gives way to this rank's part as soon as it was read, so that one whole weight at a
time is in memory.

transformers reads, converts (experts that a checkpoint keeps apart, fused projections) and casts
as always; two of torch's own hooks see a weight when its module gets it. What is not seen that
way, such as weights that a checkpoint lacks, stays whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from outrider.decode.models import facts

# transformers' mark on a weight that came from the checkpoint.
READ = "_is_hf_initialized"
# Its threads would read ahead of what is taken, without limit.
IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


def layer_stacks(model: Any) -> list[tuple[str, nn.ModuleList]]:
    """Return the stacked layers of a model's body by their name in it: outermost module
    lists that hold neither embedding nor LM head."""
    whole = (model.get_input_embeddings(), model.get_output_embeddings())
    kept = {id(p) for part in whole if part is not None for p in part.parameters()}
    found: list[tuple[str, nn.ModuleList]] = []
    for name, part in facts.body(model).named_modules():
        inside = any(name.startswith(outer + ".") for outer, _ in found)
        stacked = isinstance(part, nn.ModuleList) and not inside
        if stacked and not any(id(p) in kept for p in part.parameters()):
            found.append((name, part))
    return found


@contextlib.contextmanager
def without_layers(model: Any) -> Iterator[None]:
    """While open, the body of a model has no layers: embedding and final norm are left of it."""
    body, empty = facts.body(model), nn.ModuleList()
    stacks = layer_stacks(model)
    for name, _ in stacks:
        _exchange(body, name, empty)
    try:
        yield
    finally:
        for name, stack in stacks:
            _exchange(body, name, stack)


def _exchange(body: Any, name: str, stack: nn.ModuleList) -> None:
    parent, _, last = name.rpartition(".")
    setattr(body.get_submodule(parent), last, stack)


class Shards:
    """This rank's parts of the layers of a model, by the empty weights that stand in their place.

    rank, ranks: the part among equal ones along dimension 0, as FSDP2 cuts. device: where parts
    are kept. count: how many there are. largest: bytes of the largest weight that was held whole.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.largest = 0
        self._parts: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._parents: dict[nn.Module, nn.Module] = {}
        self._stacked: set[nn.Module] | None = None

    @property
    def count(self) -> int:
        return len(self._parts)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While open, a model is loaded."""
        before = os.environ.get(IN_TURN)
        os.environ[IN_TURN] = "1"
        read: Any = self._read  # torch takes what a hook returns, whatever its annotation says
        handles = (
            hooks.register_module_module_registration_hook(self._joined),
            hooks.register_module_parameter_registration_hook(read),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._parents.clear()
            self._stacked = None
            if before is None:
                del os.environ[IN_TURN]
            else:
                os.environ[IN_TURN] = before

    def take(self, stub: nn.Parameter) -> Tensor:
        """Return the part of the weight that an empty one replaces, given away. Raises
        LookupError for one that was never read."""
        return self._parts.pop(id(stub))[1]

    def _joined(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = parent

    def _read(self, module: nn.Module, name: str, weight: Any) -> nn.Parameter | None:
        """Return an empty weight in place of one that was read for a stacked layer."""
        if weight is None or weight.is_meta or not getattr(weight, READ, False) or not weight.dim():
            return None
        if module not in self._layers_of(module):
            return None
        whole = weight.detach()
        self.largest = max(self.largest, whole.numel() * whole.element_size())
        parts = whole.chunk(self.ranks)
        part = parts[self.rank] if self.rank < len(parts) else whole[:0]
        stub = nn.Parameter(torch.empty_like(whole, device="meta"), weight.requires_grad)
        stub.__dict__.update(weight.__dict__)
        self._parts[id(stub)] = stub, part.to(self.device, copy=True)
        return stub

    def _layers_of(self, module: nn.Module) -> set[nn.Module]:
        """Return the modules of all stacked layers of the model that this module is of."""
        if self._stacked is None:
            root = module
            while root in self._parents:
                root = self._parents[root]
            # A part that is loaded by itself is no language model: it stays whole. So does what a
            # checkpoint keeps quantised: its weights are put together after they were read.
            own = getattr(getattr(root, "config", None), "quantization_config", None)
            taken = hasattr(root, "get_output_embeddings") and not own
            stacks = [stack for _, stack in layer_stacks(root)] if taken else []
            self._stacked = {part for stack in stacks for part in stack.modules()}
        return self._stacked
