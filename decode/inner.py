"""The slots of a draft tree that have children, of all levels in one table: how verification goes
on where it may not ask the device which they are (decode/unasked.py).

Shape letters: as in decode/layout.py; I slots with children.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Inner:
    """What a Layout has of it; the fields are described there."""

    depth: Tensor
    children: Tensor
    levels: int
    room: tuple[tuple[int, int], ...] | None

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...] | None:
        """Of every level of slots, the root's first: where it begins and ends in `inner`, and the
        most children that one of them has. None where only the device knows."""
        if self.room is None:
            return None
        found, start = [], 0
        for slots, most in self.room:
            found.append((start, start + slots, most))
            start += slots
        return tuple(found)

    @functools.cached_property
    def inner(self) -> Tensor:
        """[B, I] int64 slots with children, level by level (`spans`), -1 padded."""
        level_of = torch.cat([self.depth.new_full((len(self.depth), 1), -1), self.depth], 1)
        parent, found = self.children[..., 0] >= 0, []
        for level, (most, _) in enumerate(self.room or ()):
            here = (level_of == level - 1) & parent
            slots = (~here).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
            found.append(torch.where(here.gather(1, slots), slots, -1))
        return torch.cat(found, 1) if found else level_of[:, :0]

    def counted(self) -> tuple[tuple[int, int], ...]:
        """`room` of a shape that all rows share, asked of the values."""
        level_of = [-1, *self.depth[0].tolist()]
        found = [(0, 0)] * self.levels
        for slot, kids in enumerate(self.children[0].tolist()):
            if width := sum(kid >= 0 for kid in kids):
                slots, most = found[level_of[slot] + 1]
                found[level_of[slot] + 1] = (slots + 1, max(most, width))
        return tuple(found)
