"""What a node and a level of a draft must bring (decode.price says how it is asked). Names of
drafters hold one (heads.names), and are read before torch is loaded.

Shape letters: B rows, M candidates, W nodes that are expanded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Price:
    """In kept tokens; 0: everything pays.

    node: a candidate that is less likely to be kept is left out. level: the chances of the
    nodes that a further level would hang below must come to as much between them.
    """

    node: float = 0.0
    level: float = 0.0

    def __post_init__(self) -> None:
        if not (self.node >= 0 and self.level >= 0):  # NaN too
            raise ValueError(f"price: {self} must be numbers of tokens from 0 on")

    @property
    def nothing(self) -> bool:
        """Whether everything pays."""
        return self.node <= 0 and self.level <= 0

    def __str__(self) -> str:
        return f"{self.node:.3g} a node, {self.level:.3g} a level"

    def paying(self, score: Tensor) -> Tensor:
        """Log-chances [..] with -inf in the place of those that do not pay; NaN stays."""
        import torch

        if self.node <= 0:
            return score
        return score.masked_fill(score < math.log(self.node), -torch.inf)

    def kept(self, score: Tensor, nodes: int) -> tuple[Tensor, int]:
        """The log-chances of candidates [B, M] that pay, and how many of them make the largest
        draft, at most `nodes`; `nodes` where asking is not free."""
        import torch

        from outrider.decode import waits

        score = self.paying(score)
        if not self.nothing and waits.free(score):
            nodes = min(nodes, int((score != -torch.inf).sum(1).max()))
        return score, nodes

    def expanded(self, score: Tensor, growing: Tensor | None) -> tuple[Tensor | None, int]:
        """Which rows [B, 1] grow a further level (None: all), and how many nodes are expanded
        for it. score: [B, W] log-chances of those, the best in front. growing: rows that have
        grown so far. All W where asking is not free."""
        import torch

        from outrider.decode import waits

        if self.nothing:
            return None, score.shape[1]
        pays = self.paying(score) != -torch.inf
        worth = torch.where(pays, score.exp(), 0.0).sum(1, keepdim=True)
        grown = pays.any(1, keepdim=True) & ~(worth < self.level)
        grown = grown if growing is None else grown & growing
        wide = int((pays & grown).sum(1).max()) if waits.free(score) else score.shape[1]
        return grown, wide


FREE = Price()
