"""Masks of a draft model's own passes: over what it drafted in this cycle, level by level.

Shape letters: as in decode/masks.py; R tokens drafted so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.masks import FULL, TreeMasks, within


def scratch(
    masks: TreeMasks, lengths: list[int], seen: Tensor | None, levels: list[int], new: int
) -> Tensor | dict[str, Tensor] | None:
    """Masks of a pass over `new` drafted tokens that stand, behind those drafted before
    them, in slots from the longest row's end on.

    seen: [B or 1, new, R] bool, which of all R drafted tokens each may look at; None: all
        of them, `new` is 1.
    levels: the level of each of the R tokens, 1 = directly behind the last committed one.
    Masks are [B, 1, G * new, longest + R].
    """
    longest, rows, total = max(lengths), len(lengths), len(levels)
    reach = longest + max(levels)
    bound = {kind: r for kind, r in masks.reaches.items() if r[0] != "full" and reach > r[1]}
    if min(lengths) == longest and seen is None and not bound:
        return None
    ends = torch.tensor(lengths, device=masks.device)[:, None]
    slots = torch.arange(longest, device=masks.device)
    block = (
        torch.ones(1, new, total, dtype=torch.bool, device=masks.device) if seen is None else seen
    )
    allowed = torch.cat(
        [(slots < ends)[:, None].expand(rows, new, longest), block.expand(rows, new, total)], 2
    )
    place = ends + torch.tensor(levels, device=masks.device) - 1  # [B, R]
    key, query = (
        torch.cat([slots.expand(rows, longest), place], 1)[:, None],
        place[:, total - new :, None],
    )
    made = {
        kind: masks.additive(allowed if kind == FULL else allowed & within(kind, query, key))
        for kind in {bound.get(kind, FULL) for kind in masks.reaches}
    }
    found = {kind: made[bound.get(kind, FULL)] for kind in masks.reaches}
    return found if len(found) > 1 else next(iter(found.values()))
