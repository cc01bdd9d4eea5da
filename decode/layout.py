"""What follows from the parents of a draft tree alone: depths, ancestors, children, orders of
visit.

Shape letters: B rows, N nodes per row, C most children of one node. Slot 0 is the last
committed token, slot i + 1 is node i.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """What follows from the parents alone. Leading dimension B, or 1 where all rows share one
    static shape.

    depth: [B, N] int64, 0 for children of the last committed token.
    mask: [B, N + 1, N + 1] bool, slot j is slot i itself or an ancestor of it (what slot i may
        attend to).
    children: [B, N + 1, C] int64 node numbers below a slot in draw order, -1 padded.
    rank: [B, N] int64, place of a node among its siblings in draw order.
    levels: deepest level as a count (0 for the empty tree); known on the host so that loops
        need no round trip.
    room: for every level of slots, how many of a row at most have children, where rows differ
        and the host knows it all the same; else None.
    """

    parents: Tensor
    depth: Tensor
    mask: Tensor
    children: Tensor
    rank: Tensor
    levels: int
    room: tuple[int, ...] | None = None

    @functools.cached_property
    def inner(self) -> tuple[Tensor, ...]:
        """[S] int64 slots with children of every level, the root's first, where all rows share
        one shape. One host round trip, once a layout."""
        children, depth = self.children[0].tolist(), [-1, *self.depth[0].tolist()]
        levels: list[list[int]] = [[] for _ in range(self.levels)]
        for slot, (kids, level) in enumerate(zip(children, depth, strict=True)):
            if any(kid >= 0 for kid in kids):
                levels[level + 1].append(slot)
        return tuple(torch.tensor(slots, device=self.depth.device) for slots in levels)

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
    def of(parents: Tensor) -> Layout:
        """Derive the layout of `parents` [B, N] int64 (already validated: parents[b, i] < i).

        Two host round trips on an accelerator (levels, width): static trees pay them once.
        """
        rows, n = parents.shape
        device = parents.device
        slot = torch.arange(n + 1, device=device)
        up = torch.cat(
            [torch.full((rows, 1), -1, device=device), parents + 1], 1
        )  # parent slot of every slot
        mask = torch.eye(n + 1, dtype=torch.bool, device=device).expand(rows, n + 1, n + 1).clone()
        for i in range(1, n + 1):  # parents precede children, so one sweep closes the relation
            mask[:, i] |= mask[torch.arange(rows, device=device), up[:, i]]
        depth = mask.sum(-1)[:, 1:] - 2
        levels = int(depth.max()) + 1 if n else 0
        sibling = (parents[:, :, None] == parents[:, None, :]) & (slot[:n, None] > slot[None, :n])
        rank = sibling.sum(-1)
        width = int(rank.max()) + 1 if n else 0
        children = torch.full((rows, n + 1, width), -1, dtype=torch.int64, device=device)
        batch = torch.arange(rows, device=device)[:, None].expand(rows, n)
        children[batch, parents + 1, rank] = slot[:n].expand(rows, n)
        return Layout(parents, depth, mask, children, rank, levels)
