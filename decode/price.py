"""What the growth of a draft must bring, and which nodes of it do: one rule for chains, drawn
trees and dynamic ones.

A node is worth its place in the target's pass when the chance that it is kept is above what
the place costs, and a level is worth drafting when the nodes that it would hang below are
likely enough between them. Both prices are counted in kept tokens: a cost in plain passes,
times the tokens that the time of a plain pass brings otherwise.

The chance that a node is kept is what the drafter itself says: the product of its law along
the path. A candidate that is drawn is judged before it is: by the mass that a draw from what
is left of the law has on average. So whether it is verified depends on what was drawn before
it, never on itself or on what follows (docs/lossless.md).

Shape letters: B rows, N nodes, P parents of one level, n candidates of one call, Vd draft
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decode import waits

Places = slice | Tensor


@dataclass(frozen=True)
class Price:
    """In kept tokens; 0: everything pays.

    node: a candidate that is less likely to be kept is left out. level: the chances of the
    nodes that a further level would hang below must come to as much between them.
    """

    node: float = 0.0
    level: float = 0.0

    @property
    def nothing(self) -> bool:
        """Whether everything pays."""
        return self.node <= 0 and self.level <= 0

    def __str__(self) -> str:
        return f"{self.node:.3g} a node, {self.level:.3g} a level"

    def paying(self, score: Tensor) -> Tensor:
        """Log-chances [..] with -inf in the place of those that do not pay; NaN stays."""
        if self.node <= 0:
            return score
        return score.masked_fill(score < math.log(self.node), -torch.inf)

    def expanded(self, score: Tensor, growing: Tensor) -> tuple[Tensor, int]:
        """Whether each row grows a further level, and how many of its nodes are expanded in any.
        score: [B, W] log-chances of the nodes that it would hang below, the best in front.
        growing: [B, 1] bool, those that have grown so far. All W where asking is not free."""
        pays = self.paying(score) != -torch.inf
        worth = torch.where(pays, score.exp(), 0.0).sum(1, keepdim=True)
        growing = growing & pays.any(1, keepdim=True) & ~(worth < self.level)
        wide = int((pays & growing).sum(1).max()) if waits.free(score) else score.shape[1]
        return growing, wide


FREE = Price()


def awaited(left: Tensor) -> Tensor:
    """[..] mass that a token drawn from `left` [.., Vd], what is left of a law, has in it on
    average: where the law is right about one token that will come, the chance that the draw
    meets it."""
    total = left.sum(-1)
    return (left * left).sum(-1) / torch.where(total > 0, total, 1.0)


class Growth:
    """Which nodes of a static shape pay, level by level.

    chance: [B, N] float32 that a node's whole path is kept. there: [B, N] bool, those that pay.
    """

    def __init__(self, price: Price, rows: int, nodes: int, device: torch.device) -> None:
        self.price, self.nodes = price, nodes
        self.chance = torch.zeros(rows, nodes, device=device)
        self.there = torch.zeros(rows, nodes, dtype=torch.bool, device=device)

    def enter(self, parents: Places | None) -> bool:
        """Go on with the children of the nodes `parents` (None: of the last committed token).
        False: they are drafted for nobody, where asking is free."""
        if parents is None:
            self.above = self.chance.new_ones(len(self.chance), 1)
            self.open = torch.ones_like(self.above, dtype=torch.bool)
            return True
        self.above = self.chance[:, parents]
        paying = self.there[:, parents]
        worth = torch.where(paying, self.above, 0.0).sum(1, keepdim=True)
        self.open = paying & ~(worth < self.price.level)
        return not (waits.free(self.open) and not bool(self.open.any()))

    def ask(self, number: Tensor, at: Places, chance: Tensor) -> Tensor:
        """Whether candidates [n] below the parents `at` pay, each the next one of its parent;
        chance: [B, n] of each given its parent, by what is known before it is drawn. Returns
        the numbers [B, n] at which they are drawn: one that does not pay takes none of those
        that count. What is NaN pays: the draft is refused for it later."""
        pays = self.open[:, at] & ~(self.above[:, at] * chance < self.price.node)
        self.open[:, at] = pays  # a younger sibling was drawn as if this one had been tried
        self.there[:, number] = pays
        return torch.where(pays, number, number + self.nodes)

    def tell(self, number: Tensor, at: Places, chance: Tensor) -> None:
        """What candidates that were asked for turned out to be: their chance [B, n] given their
        parents, now that they are known."""
        self.chance[:, number] = (self.above[:, at] * chance).to(self.chance.dtype)
