"""Which slots of a tree are read, and when: level by level those that can be reached, where the
host may ask which they are; else all of them in one go, which asks the device nothing. The accept
rule in decode/verify.py is the same over both, and so are the tokens.

Shape letters: as in decode/verify.py; I slots with children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import devices
from outrider.decode.layout import Inner
from outrider.decode.residual import first_ratio
from outrider.decode.rng import Coins
from outrider.decode.sampling import Distribution, Support
from outrider.decode.siblings import Family, read
from outrider.decode.tree import DraftTree


class Judged(NamedTuple):
    """A family, what is left of its distributions [.., S] and the chance [..] that its slots remain
    (residual.LevelVerdict)."""

    family: Family
    residual: Tensor
    rest: Tensor


@dataclass(frozen=True)
class LevelByLevel:
    """Where asking is free: only what can be reached, and loops end as soon as nothing is."""

    tree: DraftTree
    distribution: Distribution

    def batches(self, missing: Callable[[], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and slots [R] to read one after the other: the roots, then what is `missing` [B, N +
        1] until nothing is."""
        rows = torch.arange(len(self.tree.tokens), device=self.tree.tokens.device)
        slots = torch.zeros_like(rows)
        yield rows, slots
        for _ in range(self.tree.layout.levels):
            rows, slots = missing().nonzero(as_tuple=True)
            if not rows.numel():
                return
            yield rows, slots

    def families(self, reach: Tensor) -> Iterator[tuple[Family, Tensor | None]]:
        """Slots that have children, top down, and memory for what is left of them. reach: [B, N +
        2] float64, written by the caller before the next ones are asked for."""
        tree = self.tree
        level_of, n = tree.positions(), tree.width
        present = torch.arange(n + 1, device=reach.device) <= tree.size[:, None]
        for level in range(tree.layout.levels):
            here = (level_of == level) & present & (reach[:, : n + 1] > 0)
            family = parents(tree, self.distribution, *here.nonzero(as_tuple=True))
            if family is None:
                return
            yield family, None

    def whole(self, judged: list[Judged]) -> list[Judged]:
        """All that was judged, as it was read."""
        return judged

    def bonus(self, rng: Coins, end: Tensor, judged: Sequence[Judged]) -> Tensor:
        """The token [B] after slot `end` [B]: from the residual where its children failed, from the
        distribution itself at a leaf."""
        bonus = torch.zeros_like(end)
        leaf = torch.ones_like(end, dtype=torch.bool)
        for family, residual, _ in judged:
            hit = (end[family.rows] == family.slots).nonzero()[:, 0]
            if hit.numel():
                left, rows = family.remains(residual, hit), family.rows[hit]
                bonus[rows] = left.token(rng.draw(left.probs, rows, end[rows] - 1))
                leaf[rows] = False
        rows = leaf.nonzero()[:, 0]
        if rows.numel():
            support = self.distribution.at(rows, end[rows])
            bonus[rows] = support.token(rng.draw(support.probs, rows, end[rows] - 1))
        return bonus


@dataclass
class AllAtOnce:
    """Where asking would wait for the device: every slot. See LevelByLevel."""

    tree: DraftTree
    distribution: Distribution
    _family: Family | None = None  # all that was read, and what is left of it
    _memory: Tensor | None = None

    def batches(self, missing: Callable[[], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows and slots."""
        count, n = self.tree.tokens.shape
        slots = torch.arange(n + 1, device=self.tree.tokens.device).expand(count, -1)
        rows = torch.arange(count, device=slots.device)[:, None].expand(-1, n + 1)
        yield rows.reshape(-1), slots.reshape(-1)

    def families(self, reach: Tensor) -> Iterator[tuple[Family, Tensor | None]]:
        """All slots with children are read together, and judged in runs of levels: a level whose
        slots have one child each asks for no residual to go on."""
        inner = self.tree.layout.inner
        assert inner is not None
        if not inner.spans:
            return
        self._family = family = self._read(inner)
        q = family.siblings.q
        self._memory = memory = q.new_empty(*q.shape[:-1], q.shape[-1] + 1)
        ratio = None
        for run in inner.runs:
            for start, stop, _ in run[:-1]:
                ratio = first_ratio(family.siblings) if ratio is None else ratio
                rows, slots = family.rows[:, start:stop], family.slots[:, start:stop]
                chance = (reach[rows, slots] * ratio[:, start:stop]).clamp_(max=1)
                reach[rows, family.below[:, start:stop, 0]] = chance
            start, (_, stop, ranks) = run[0][0], run[-1]
            yield family.part(start, stop, ranks), memory[:, start:stop]

    def _read(self, inner: Inner) -> Family:
        """Of a leaf, as where a budget ends, the distribution is asked for only if the path ends
        there."""
        count, tree = self.tree.tokens.shape[0], self.tree
        slots, kids = inner.slots.expand(count, -1), inner.kids.expand(count, -1, -1)
        rows = torch.arange(count, device=slots.device)[:, None].expand_as(slots)
        valid = (kids >= 0) & (kids < tree.size[:, None, None])
        return read(tree, self.distribution, rows, slots, kids, valid)

    def whole(self, judged: list[Judged]) -> list[Judged]:
        """The runs as the one family that was read."""
        if self._family is None or self._memory is None:
            return judged
        rest = torch.cat([part.rest for part in judged], 1)
        return [Judged(self._family, self._memory[..., :-1], rest)]

    def bonus(self, rng: Coins, end: Tensor, judged: Sequence[Judged]) -> Tensor:
        """As LevelByLevel.bonus: what is left and the distribution of a leaf are laid side by side,
        and every row draws from one."""
        every = torch.arange(len(end), device=end.device)
        leaf = self.distribution.at(every, end)
        if not judged:
            return leaf.token(rng.draw(leaf.probs, every, end - 1))
        ((family, residual, _),) = judged
        hit = (family.slots == end[:, None]) & family.valid[..., 0]
        left = family.remains(residual, every * hit.shape[1] + hit.view(torch.uint8).argmax(1))
        parent = hit.any(1, keepdim=True)
        short = leaf.probs.shape[1] - left.probs.shape[1]  # more of one may have been looked at

        def chosen(left: Tensor, leaf: Tensor) -> Tensor:
            longer = F.pad(left, (0, max(0, short))), F.pad(leaf, (0, max(0, -short)))
            return torch.where(parent, *longer)

        ids = None if left.ids is None or leaf.ids is None else chosen(left.ids, leaf.ids)
        support = Support(ids, chosen(left.probs, leaf.probs.to(torch.float64)))
        return support.token(rng.draw(support.probs, every, end - 1))


def parents(
    tree: DraftTree, distribution: Distribution, rows: Tensor, slots: Tensor
) -> Family | None:
    """Those of the slots [R] of `rows` [R] that have children; None where none has."""
    table = tree.layout.children
    kids = table[rows, slots] if table.shape[0] > 1 else table[0, slots]
    valid = (kids >= 0) & (kids < tree.size[rows, None])
    inner = valid.any(1)
    if not bool(inner.all()):
        rows, slots, kids, valid = (t[inner] for t in (rows, slots, kids, valid))
    if not rows.numel():
        return None
    ranks = int(valid.any(0).sum()) if devices.on_cpu(valid) else valid.shape[1]
    return read(tree, distribution, rows, slots, kids[:, :ranks], valid[:, :ranks])
