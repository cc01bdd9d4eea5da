"""What follows from the parents of a draft tree alone: depths, ancestors, children, orders of
visit.

Shape letters: B rows, N nodes per row, C most children of one node. Slot 0 is the last
committed token, slot i + 1 is node i.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decode import devices

Span = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Inner:
    """The slots of a layout that have children, of all levels in one table, I of a row.

    slots: [B, I] int64, level by level; where a row has fewer, slots without. kids: [B, I, C]
    int64 their children in draw order, N where none is. spans: of every level of slots, the
    root's first, where it begins and ends in `slots`, and the most children that one of them
    has."""

    slots: Tensor
    kids: Tensor
    spans: tuple[Span, ...]


class Places(NamedTuple):
    """R slots that have children, level by level, those of a level row by row.

    rows, slots: [R] int64. kids: [R, C] int64 their children in draw order, N where none is. own:
    [R] and below: [R, C] int64, where the slots and their children stand in a table [B, N + 2],
    flattened; nodes: [R, C] int64, the children in a table [B, N]."""

    rows: Tensor
    slots: Tensor
    kids: Tensor
    own: Tensor
    below: Tensor
    nodes: Tensor


@functools.lru_cache(maxsize=256)
def places(inner: Inner, spans: tuple[Span, ...], count: int, n: int) -> Places:
    """Return the slots of neighbouring levels, of `count` rows of `n` nodes."""
    here, ranks = slice(spans[0][0], spans[-1][1]), max(most for *_, most in spans)
    slots = inner.slots[:, here].expand(count, -1).T.reshape(-1)
    kids = inner.kids[:, here, :ranks].expand(count, -1, -1).transpose(0, 1).reshape(-1, ranks)
    rows = torch.arange(count, device=slots.device).repeat(len(slots) // count)
    start, above = (rows * (n + 2))[:, None], (rows * n)[:, None]
    nodes = kids.clamp(max=n - 1) + above
    return Places(rows, slots, kids, slots + start[:, 0], kids + 1 + start, nodes)


def runs(spans: Sequence[Span], count: int) -> Iterator[list[Span]]:
    """Yield `spans` as places of `count` rows, in runs, of whose levels all but the last have slots
    with one child only."""
    run = list[Span]()
    for start, stop, most in spans:
        begin = spans[0][0]
        run.append(((start - begin) * count, (stop - begin) * count, most))
        if most > 1:
            yield run
            run = []
    if run:
        yield run


@dataclass(frozen=True)
class TreeLayout:
    """What follows from the parents alone. Leading dimension B, or 1 where all rows share one
    static shape.

    depth: [B, N] int64, 0 for children of the last committed token.
    mask: [B, N + 1, N + 1] bool, slot j is slot i itself or an ancestor of it (what slot i may
        attend to).
    children: [B, N + 1, C] int64 node numbers below a slot in draw order, -1 padded.
    rank: [B, N] int64, place of a node among its siblings in draw order.
    levels: deepest level as a count (0 for the empty tree); known on the host so that loops
        need no round trip.
    known: `inner`, where the host has worked it out.
    """

    parents: Tensor
    depth: Tensor
    mask: Tensor
    children: Tensor
    rank: Tensor
    levels: int
    known: Inner | None = None

    @functools.cached_property
    def inner(self) -> Inner:
        """The slots with children; asks the device where it is not `known`."""
        if self.known is not None:
            return self.known
        kids = (self.children >= 0).sum(2)
        found, below, spans = [self.positions[:, :0]], [self.children[:, :0]], list[Span]()
        for level in range(self.levels):
            here = (kids > 0) & (self.positions == level)
            count, most = int(here.sum(1).amax()), int(kids.where(here, 0).amax())
            slots = (~here).view(torch.uint8).argsort(dim=1, stable=True)[:, :count]
            start = spans[-1][1] if spans else 0
            spans.append((start, start + count, most))
            of_slot = self.children.gather(
                1, slots[..., None].expand(-1, -1, self.children.shape[2])
            )
            found.append(slots)
            missing = ~here.gather(1, slots)[..., None] | (of_slot < 0)
            below.append(of_slot.masked_fill(missing, self.parents.shape[1]))
        return Inner(torch.cat(found, 1), torch.cat(below, 1), tuple(spans))

    def to(self, device: torch.device) -> TreeLayout:
        """The same on `device`."""
        names = ("parents", "depth", "mask", "children", "rank")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        slots, kids = (t.to(device) for t in (self.inner.slots, self.inner.kids))
        return replace(self, **moved, known=Inner(slots, kids, self.inner.spans))

    @functools.cached_property
    def positions(self) -> Tensor:
        """[B, N + 1] int64: distance of every slot from the last committed token."""
        return torch.cat([self.depth.new_zeros(self.depth.shape[0], 1), self.depth + 1], 1)

    @functools.cached_property
    def paths(self) -> Tensor:
        """[B, N + 1, levels] int64 nodes from the top to each slot, -1 padded."""
        rows, n = self.parents.shape
        device = self.parents.device
        path = torch.full((rows, n + 1, self.levels + 1), -1, dtype=torch.int64, device=device)
        above = self.mask[:, :, 1:]  # slots that are not above write behind the last level
        node = torch.arange(n, device=device).expand_as(above)
        place = torch.where(above, self.depth[:, None], self.levels)
        return path.scatter_(2, place, node)[..., : self.levels]

    @functools.cached_property
    def postorder(self) -> Tensor:
        """[B, N + 1] int64 slots, children before parents, siblings in draw order; slot 0
        comes last.

        A slot's key is its path of ranks padded with a number above every rank, so that a node
        sorts behind its subtree; padding nodes of ragged rows stand somewhere and must be
        masked by their size.
        """
        rows, n = self.parents.shape
        device = self.parents.device
        levels, beyond = max(self.levels, 1), n + 1
        path = torch.full((rows, n + 1, levels + 1), beyond, dtype=torch.int64, device=device)
        above = self.mask[:, :, 1:]  # slots that are not above write behind the last level
        place = torch.where(above, self.depth[:, None], levels)
        path.scatter_(2, place, self.rank[:, None].expand(rows, n + 1, n))
        order = torch.arange(n + 1, device=device).expand(rows, n + 1)
        for level in reversed(range(levels)):  # stable sorts, least significant level first
            order = order.gather(1, path[:, :, level].gather(1, order).argsort(dim=1, stable=True))
        return order

    @staticmethod
    def of(parents: Tensor, depth: Tensor | None = None, levels: int = 0) -> TreeLayout:
        """Derive the layout of `parents` [B, N] int64 (already validated: parents[b, i] < i).

        depth: [B, N], and how many `levels` there are at most, where they are known; else two
        host round trips on an accelerator (levels, width), which static trees pay once."""
        rows, n = parents.shape
        slot = torch.arange(n + 1, device=parents.device)
        ask = depth is None
        if depth is None:
            depth = torch.zeros_like(parents)
            for i in range(1, n):  # parents precede children
                above = parents[:, i : i + 1]
                below = depth.gather(1, above.clamp(min=0)) + 1
                depth[:, i : i + 1] = torch.where(above >= 0, below, 0)
            levels = int(depth.max()) + 1 if n else 0
        up = torch.cat([parents.new_zeros(rows, 1), parents + 1], 1)  # parent of every slot
        own = torch.eye(n + 1, dtype=torch.bool, device=parents.device)
        mask = own.expand(rows, n + 1, n + 1)
        for _ in range(levels):
            mask = own | mask.gather(1, up[..., None].expand(-1, -1, n + 1))
        sibling = (parents[:, :, None] == parents[:, None, :]) & (slot[:n, None] > slot[None, :n])
        rank = sibling.sum(-1)
        width = n  # without asking; what is too wide is filled with -1
        if ask or devices.on_cpu(rank):
            width = int(rank.max()) + 1 if n else 0
        children = parents.new_full((rows, n + 1, width), -1)
        batch = torch.arange(rows, device=parents.device)[:, None].expand(rows, n)
        children[batch, parents + 1, rank] = slot[:n].expand(rows, n)
        return TreeLayout(parents, depth, mask, children, rank, levels)
