"""The slots of a draft tree that have children, of all levels in one table: how verification goes
on where it may not ask the device which they are (decode/unasked.py).

Shape letters: as in decode/layout.py; I slots with children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# For every level of slots, the root's first: how many of a row have children and how many at
# most.
Room = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Inner:
    """slots: [B, I] int64, level by level, -1 padded. spans: of every level of slots, the root's
    first, where it begins and ends in `slots`, and the most children that one of them has."""

    slots: Tensor
    spans: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(depth: Tensor, children: Tensor, room: Room) -> Inner:
        """depth, children: of a `Layout`; room: no less than its rows have."""
        level_of = torch.cat([depth.new_full((len(depth), 1), -1), depth], 1)
        parent = (children >= 0).any(2)
        found, spans, start = [level_of[:, :0]], [], 0
        for level, (count, most) in enumerate(room):
            here = (level_of == level - 1) & parent
            slots = (~here).view(torch.uint8).argsort(dim=1, stable=True)[:, :count]
            found.append(torch.where(here.gather(1, slots), slots, -1))
            spans.append((start, start + count, most))
            start += count
        return Inner(torch.cat(found, 1), tuple(spans))


def room_of(paths: Iterable[tuple[int, ...]]) -> Room:
    """What the slots of a static shape need that has these paths (decode.tree.TreeShape)."""
    kids = Counter(path[:-1] for path in paths)
    widths: dict[int, list[int]] = {}
    for above, count in kids.items():
        widths.setdefault(len(above), []).append(count)
    return tuple((len(widths[level]), max(widths[level])) for level in sorted(widths))
