"""How much memory a row of the table takes: what its drafter holds beside the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from outrider.decode.drafters import Drafter
from outrider.decode.target import Target

# Attributes of a drafter that are made for a run, or the target's.
LEFT_OUT = ("cache", "masks", "target", "embed", "rope", "h", "state")


def own_elements(drafter: Drafter, target: Target) -> tuple[int, int]:
    """(elements, bytes) of the floating-point weights that a drafter keeps and its target does
    not. K/V caches and whatever else is made for a run do not count: ask before the first one."""
    theirs = {_place(t) for t in (*target.model.parameters(), *target.model.buffers())}
    held = {_place(t): t for t in _weights(drafter, set()) if t.is_floating_point() and t.numel()}
    mine = [t for place, t in held.items() if place not in theirs]
    return sum(t.numel() for t in mine), sum(t.numel() * t.element_size() for t in mine)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _weights(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that a drafter leads to. seen: objects that were looked into."""
    inner: list[Any] = []
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Target):  # as it was loaded: its layers may be packed
        yield from value.model.parameters()
    elif isinstance(value, dict | list | tuple):
        inner = [*(value.values() if isinstance(value, dict) else value)]
    elif type(value).__module__.startswith(("outrider.decode.", "outrider.heads.")):
        known = getattr(value, "__dict__", {})
        inner = [item for name, item in known.items() if name not in LEFT_OUT]
    for item in inner:
        yield from _weights(item, seen)
