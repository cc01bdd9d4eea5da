"""What a drafter is, and those that need no training: none and n-gram (prompt lookup). A
separate draft model stands in decode/draft_model.py.

A drafter sees committed tokens and the target features that predicted them, and proposes a
DraftTree. Trained heads (heads/) implement the same protocol. Whatever a drafter does, the
output law is the target's: a broken one only lowers acceptance, so acceptance has tests of its
own.

Shape letters: B live rows, n tokens per row, K taps, D hidden size.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decode.draft_model import DraftModel
from decode.rng import Rng
from decode.sampling import Sampling
from decode.tree import DraftTree

__all__ = ["DraftModel", "Drafter", "NGram", "NoDraft"]


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
        """tokens: [b, n_max] newly committed tokens of live `rows`, n: [b] how many are real
        (padding behind).

        feats: [b, n_max, K, D], the features at the position BEFORE each token, those that
        predicted it. The first call for a row carries prompt[1:] and the first generated
        token.
        """

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft for every live row, at most budget[b] levels deep (0 is allowed). budget:
        [B] int64.
        """
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
        self.rows += len(prompts)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        pass

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return DraftTree.empty(self.rows, budget.device)

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)


class NGram:
    """Prompt lookup (Saxena 2023): continue as the latest earlier occurrence of the last n
    tokens went on.

    The longest n from `longest` down to 1 that occurs wins. A deterministic chain of at most
    `depth` tokens.
    """

    name, shape = "ngram", "chain"
    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = 10, longest: int = 3) -> None:
        self.max_nodes = self.max_depth = depth
        self.longest = longest
        self.ids: list[np.ndarray] = []

    def reset(self, rows: int, max_len: int) -> None:
        self.ids = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.ids += [
            p[:1].cpu().numpy() for p in prompts
        ]  # the rest of the prompt arrives by observe

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        fresh = tokens.cpu().numpy()
        for b, new, count in zip(range(rows.start, rows.stop), fresh, n.tolist(), strict=True):
            self.ids[b] = np.concatenate([self.ids[b], new[:count]])

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        found = [
            self._lookup(ids)[: max(int(k), 0)]
            for ids, k in zip(self.ids, budget.tolist(), strict=True)
        ]
        width = max(map(len, found))
        tokens = torch.zeros(len(found), width, dtype=torch.int64)
        for b, run in enumerate(found):
            tokens[b, : len(run)] = torch.from_numpy(run)
        return DraftTree.chain(
            tokens.to(budget.device), torch.tensor([len(f) for f in found], device=budget.device)
        )

    def select(self, rows: list[int]) -> None:
        self.ids = [self.ids[b] for b in rows]

    def _lookup(self, ids: np.ndarray) -> np.ndarray:
        for n in range(min(self.longest, len(ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
            hits = np.flatnonzero((windows == ids[-n:]).all(1))
            if len(hits):
                start = hits[-1] + n
                return ids[start : start + self.max_depth]
        return ids[:0]
