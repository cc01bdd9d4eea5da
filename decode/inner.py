"""The slots of a draft tree that have children, of all levels in one table: how verification goes
on where it may not ask the device which they are (frontier.AllAtOnce).

Shape letters: as in decode/layout.py; I slots with children.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# For every level of slots, the root's first: how many of a row have children and how many at
# most.
Room = tuple[tuple[int, int], ...]
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Inner:
    """The slots of a layout that have children, of all levels in one table, I of a row.

    slots: [B, I] int64, level by level; where a row has fewer, slots without. kids: [B, I, C]
    int64 their children in draw order, -1 padded. spans: of every level of slots, the root's
    first, where it begins and ends in `slots`, and the most children that one of them has."""

    slots: Tensor
    kids: Tensor
    spans: tuple[Span, ...]

    @functools.cached_property
    def runs(self) -> tuple[tuple[Span, ...], ...]:
        """`spans` in runs, of whose levels all but the last have slots with one child only."""
        runs: list[list[Span]] = []
        for span in self.spans:
            if not runs or runs[-1][-1][2] > 1:
                runs.append([])
            runs[-1].append(span)
        return tuple(map(tuple, runs))

    @staticmethod
    def of(positions: Tensor, children: Tensor, room: Room) -> Inner:
        """positions, children: of a `Layout`; room: no less than its rows have."""
        parent = (children >= 0).any(2)
        found, there, spans, start = [positions[:, :0]], [parent[:, :0]], [], 0
        for level, (count, most) in enumerate(room):
            here = (positions == level) & parent
            slots = (~here).view(torch.uint8).argsort(dim=1, stable=True)[:, :count]
            found.append(slots)
            there.append(here.gather(1, slots))
            spans.append((start, start + count, most))
            start += count
        slots, used = torch.cat(found, 1), torch.cat(there, 1)[..., None]
        kids = children.gather(1, slots[..., None].expand(-1, -1, children.shape[2]))
        return Inner(slots, torch.where(used, kids, -1), tuple(spans))


def room_of(paths: Iterable[tuple[int, ...]]) -> Room:
    """What the slots of a static shape need that has these paths (decode.tree.TreeShape)."""
    kids = Counter(path[:-1] for path in paths)
    widths: dict[int, list[int]] = {}
    for above, count in kids.items():
        widths.setdefault(len(above), []).append(count)
    return tuple((len(widths[level]), max(widths[level])) for level in sorted(widths))
