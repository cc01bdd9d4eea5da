"""What a drafter is, and the one that proposes nothing. Others that need no training are n-gram
(prompt lookup, decode/ngram.py) and a separate model (decode/draft_model.py); decode/adaptive.py
wraps another one. Trained heads are in heads/.

A drafter sees committed tokens and the target features that predicted them, and proposes a
DraftTree. Whatever a drafter does, the output distribution is the target's: a broken one only
lowers acceptance, so acceptance has tests of its own.

Shape letters: B live rows, n tokens per row, K taps, D hidden size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree


class Drafter(Protocol):
    """name: for tables. shape: "none", "chain" or "tree". taps: target features it wants
    (decode.target's numbering).

    max_depth: levels it may propose. max_nodes: nodes it may propose.
    """

    name: str
    shape: str
    taps: tuple[int, ...]
    max_nodes: int
    max_depth: int

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything. At most `rows` rows will live at once, each with at most
        `max_len` committed tokens.
        """

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append rows. prompts: 1-D int64, whole, first token included."""

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens: [b, n_max] newly committed tokens of live `rows`, n: [b] int64 on the host,
        how many are real (padding behind).

        feats: [b, n_max, K, D], the features at the position BEFORE each token, those that
        predicted it. The first call for a row carries prompt[1:] and the first generated
        token.
        """

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """Return a draft for every live row, at most budget[b] levels deep (0 is allowed).
        budget: [B] int64 on the host."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""


class NoDraft:
    """Proposes nothing: plain autoregressive decoding through the same engine, the baseline of
    every table.
    """

    name, shape = "none", "none"
    taps: tuple[int, ...] = ()
    max_nodes = max_depth = 0

    def __init__(self) -> None:
        self.rows = 0

    def reset(self, rows: int, max_len: int) -> None:
        self.rows = 0

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.rows, self.device = self.rows + len(prompts), prompts[0].device

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        pass

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return DraftTree.empty(self.rows, self.device)

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)
