"""The form of a draft: static shapes, and what follows from the parents of its nodes alone.

Shape letters: B rows, N nodes per row, I slots with children, C most children of one node. Slot 0
is the last committed token, slot i + 1 is node i.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.conf.errors import UserError

Span = tuple[int, int, int]
Run = tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class Inner:
    """The slots of a layout that have children, of all levels in one table, I of a row.

    slots: [B, I] int64, level by level; where a row has fewer, slots without. kids: [B, I, C]
    int64 their children in draw order, N where none is. runs: of every level of slots, the
    root's first, where it begins and ends in `slots`, and the most children that one of them
    has; levels of one slot with one child stand in a run with the level behind them."""

    slots: Tensor
    kids: Tensor
    runs: tuple[Run, ...]


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
def places(
    inner: Inner, runs: tuple[Run, ...], count: int, n: int
) -> tuple[Places, tuple[Run, ...]]:
    """Return the slots of neighbouring levels, of `count` rows of `n` nodes, and where the
    runs stand among them."""
    ranks = max(most for run in runs for *_, most in run)
    begin, end = runs[0][0][0], runs[-1][-1][1]
    slots = inner.slots[:, begin:end].expand(count, -1).T.reshape(-1)
    kids = inner.kids[:, begin:end, :ranks].expand(count, -1, -1).transpose(0, 1).reshape(-1, ranks)
    rows = torch.arange(count, device=slots.device).repeat(len(slots) // count)
    start, above = (rows * (n + 2))[:, None], (rows * n)[:, None]
    moved = (
        tuple(((a - begin) * count, (b - begin) * count, most) for a, b, most in run)
        for run in runs
    )
    nodes = kids.clamp(max=n - 1) + above
    table = Places(rows, slots, kids, slots + start[:, 0], kids + 1 + start, nodes)
    return table, tuple(moved)


@dataclass(frozen=True)
class TreeLayout:
    """What follows from the parents alone. Leading dimension B, or 1 where all rows share one
    static shape.

    parents: [B, N] int64, -1 for children of the last committed token. depth: [B, N] int64, 0 for
    those. levels: deepest level as a count (0 for the empty tree); known on the host so that loops
    need no round trip. known: `inner`, where the host has worked it out.
    """

    parents: Tensor
    depth: Tensor
    levels: int
    known: Inner | None = None

    @staticmethod
    def of(parents: Tensor) -> TreeLayout:
        """Derive the layout of `parents` [B, N] int64 (already validated: parents[b, i] < i); asks
        the device once."""
        depth, n = torch.zeros_like(parents), parents.shape[1]
        for i in range(1, n):  # parents precede children
            above = parents[:, i : i + 1]
            below = depth.gather(1, above.clamp(min=0)) + 1
            depth[:, i : i + 1] = torch.where(above >= 0, below, 0)
        return TreeLayout(parents, depth, int(depth.max()) + 1 if n else 0)

    def to(self, device: torch.device) -> TreeLayout:
        """Return the same on `device`, `inner` with it."""
        inner = Inner(self.inner.slots.to(device), self.inner.kids.to(device), self.inner.runs)
        return TreeLayout(self.parents.to(device), self.depth.to(device), self.levels, inner)

    @functools.cached_property
    def positions(self) -> Tensor:
        """[B, N + 1] int64: distance of every slot from the last committed token."""
        return torch.cat([self.depth.new_zeros(self.depth.shape[0], 1), self.depth + 1], 1)

    @functools.cached_property
    def mask(self) -> Tensor:
        """[B, N + 1, N + 1] bool, slot j is slot i itself or an ancestor of it (what slot i may
        attend to)."""
        rows, n = self.parents.shape
        own = torch.eye(n + 1, dtype=torch.bool, device=self.parents.device)
        up = torch.cat([self.parents.new_zeros(rows, 1), self.parents + 1], 1)[..., None]
        mask = own.expand(rows, n + 1, n + 1)
        for _ in range(self.levels):
            mask = own | mask.gather(1, up.expand(-1, -1, n + 1))
        return mask

    @functools.cached_property
    def rank(self) -> Tensor:
        """[B, N] int64, place of a node among its siblings in draw order."""
        return (self.parents[:, :, None] == self.parents[:, None]).tril(-1).sum(2)

    @functools.cached_property
    def inner(self) -> Inner:
        """The slots with children; reads from the device where it is not `known`."""
        if self.known is not None:
            return self.known
        (rows, n), above = self.parents.shape, self.parents + 1
        kids = above.new_zeros(rows, n + 1).scatter_add_(1, above, torch.ones_like(above))
        slots, used, runs = [above[:, :0]], [above[:, :0].bool()], list[Run]()
        start, ranks, alone = 0, 0, False
        for level in range(self.levels):
            here = (kids > 0) & (self.positions == level)
            count, most = int(here.sum(1).amax()), int(kids.where(here, 0).amax())
            slots.append((~here).view(torch.uint8).argsort(dim=1, stable=True)[:, :count])
            used.append(here.gather(1, slots[-1]))
            before = runs.pop() if alone else ()
            runs.append((*before, (start, start + count, most)))
            start, ranks, alone = start + count, max(ranks, most), count == most == 1
        slot = torch.cat(slots, 1)
        place = above.new_zeros(rows, n + 2)  # of every slot in the table
        number = torch.arange(slot.shape[1], device=slot.device).expand_as(slot)
        place.scatter_(1, slot.where(torch.cat(used, 1), n + 1), number)
        table = above.new_full((rows, slot.shape[1] * ranks), n)
        node = torch.arange(n, device=slot.device).expand_as(above)
        table.scatter_(1, place.gather(1, above) * ranks + self.rank, node)
        return Inner(slot, table.view(rows, slot.shape[1], ranks), tuple(runs))

    @functools.cached_property
    def paths(self) -> Tensor:
        """[B, N + 1, levels] int64 nodes from the top to each slot, -1 padded."""
        return self._along(torch.arange(self.parents.shape[1], device=self.parents.device), -1)

    def _along(self, values: Tensor, beyond: int) -> Tensor:
        """[B, N + 1, levels]: `values` [N] or [B, N] of the nodes from the top to each slot,
        `beyond` behind it."""
        rows, n = self.parents.shape
        path = values.new_full((rows, n + 1, self.levels + 1), beyond)
        above = self.mask[:, :, 1:]  # slots that are not above write behind the last level
        place = torch.where(above, self.depth[:, None], self.levels)
        path.scatter_(2, place, values.expand(rows, n)[:, None].expand(rows, n + 1, n))
        return path[..., : self.levels]

    @functools.cached_property
    def postorder(self) -> Tensor:
        """[B, N + 1] int64 slots, children before parents, siblings in draw order; slot 0
        comes last.

        A slot's key is its path of ranks padded with a number above every rank, so that a node
        sorts behind its subtree; padding nodes of ragged rows stand somewhere and must be
        masked by their size.
        """
        rows, n = self.parents.shape
        path = self._along(self.rank, n + 1)
        order = torch.arange(n + 1, device=path.device).expand(rows, n + 1)
        for level in reversed(range(self.levels)):  # stable sorts, least significant level first
            order = order.gather(1, path[:, :, level].gather(1, order).argsort(dim=1, stable=True))
        return order


@dataclass(frozen=True)
class TreeShape:
    """A static tree as paths of ranks: (0,) is the best child of the last token, (0, 2) the
    third best below it.

    Nodes stand level by level, so cutting a row at depth d keeps a prefix of them.
    """

    paths: tuple[tuple[int, ...], ...]

    @staticmethod
    @functools.cache
    def chain(n: int) -> TreeShape:
        return TreeShape(tuple((0,) * (i + 1) for i in range(n)))

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> TreeShape:
        """Sort and check: every prefix present, ranks of siblings 0, 1, 2 ... Raises UserError
        otherwise.
        """
        known = {tuple(int(r) for r in p) for p in paths}
        for path in known:
            *before, last = path or (-1,)
            if last < 0 or not {tuple(before), (*before, max(0, last - 1))} <= {(), *known}:
                raise UserError(
                    f"tree: path {list(path)} is no list of ranks >= 0 whose parent and elder "
                    "sibling are paths as well; add them"
                )
        return TreeShape(tuple(sorted(known, key=lambda path: (len(path), path))))

    def __len__(self) -> int:
        return len(self.paths)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.paths)

    @functools.cached_property
    def depth(self) -> int:
        return max((len(p) for p in self.paths), default=0)

    def cut(self, depth: int) -> TreeShape:
        """Return the nodes no deeper than `depth` levels."""
        return self if depth >= self.depth else _cut(self, depth)

    def level(self, d: int) -> range:
        """Node numbers of level d (0 = children of the last committed token)."""
        start = sum(len(p) <= d for p in self.paths)
        return range(start, start + sum(len(p) == d + 1 for p in self.paths))

    @functools.cached_property
    def counts(self) -> Tensor:
        """[depth + 1] int64, on the host: nodes no deeper than 0, 1 .. levels."""
        return torch.tensor([self.level(d).start for d in range(self.depth + 1)])

    def size_at(self, budget: Tensor) -> Tensor:
        """Number of nodes no deeper than `budget` [B] levels, on the host: [B] int64."""
        return self.counts[budget.clamp(0, self.depth)]

    def parents(self, device: torch.device) -> Tensor:
        """[1, N] int64."""
        return self.layout(device).parents

    def layout(self, device: torch.device) -> TreeLayout:
        return _static(self, torch.device(device))


@functools.lru_cache(maxsize=256)
def _cut(shape: TreeShape, depth: int) -> TreeShape:
    return TreeShape(tuple(p for p in shape.paths if len(p) <= depth))


@functools.lru_cache(maxsize=256)
def _static(shape: TreeShape, device: torch.device) -> TreeLayout:
    index = {path: i for i, path in enumerate(shape.paths)}
    parents = [index.get(p[:-1], -1) for p in shape.paths]
    return TreeLayout.of(torch.tensor([parents], dtype=torch.int64)).to(device)
