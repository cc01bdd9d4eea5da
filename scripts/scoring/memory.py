"""How much memory a row of the table takes: what its drafter holds beside the target."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outrider.decode.drafters import Drafter
from outrider.decode.target import Target

# How far to look: a drafter may lie in another one, that in a union, that in another one again.
DEEPEST = 10


def own_elements(drafter: Drafter, target: Target) -> tuple[int, int]:
    """(elements, bytes) of the floating-point weights that a drafter keeps and its target does
    not. K/V caches and whatever else is made for a run do not count: ask before the first one."""
    theirs = {
        p.untyped_storage().data_ptr()
        for p in [*target.model.parameters(), *target.model.buffers()]
    }
    found: dict[int, Tensor] = {}
    _walk(drafter, found, set(), DEEPEST)
    mine = [t for pointer, t in found.items() if pointer not in theirs]
    return sum(t.numel() for t in mine), sum(t.numel() * t.element_size() for t in mine)


def _walk(value: Any, found: dict[int, Tensor], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            found.setdefault(value.untyped_storage().data_ptr(), value)
    elif isinstance(value, nn.Module):
        for weight in value.parameters():
            _walk(weight, found, seen, depth)
    elif isinstance(value, Target):  # as it was loaded: its layers may be packed
        _walk(value.model, found, seen, depth)
    elif isinstance(value, dict):
        for item in value.values():
            _walk(item, found, seen, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _walk(item, found, seen, depth - 1)
    elif type(value).__module__.startswith(("outrider.decode.", "outrider.heads.")) and hasattr(
        value, "__dict__"
    ):
        for name, item in vars(value).items():
            if name not in ("cache", "masks", "target", "embed", "rope", "h", "state"):
                _walk(item, found, seen, depth - 1)
