"""Wrappers around a drafter: their base, and one that adapts the draft's length to what was
accepted.

Shape letters: B live rows, D deepest level.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree


class Wrapped:
    """Does as `inner`; a subclass says what it does otherwise."""

    name: str
    shape: str
    taps: tuple[int, ...]
    max_nodes: int
    max_depth: int

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet set: a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


PRIOR_MEAN, PRIOR_WEIGHT, RATE_MEMORY = 0.6, 4.0, 0.95


class Adaptive(Wrapped):
    """Lowers the budget of every row to the depth that gives most tokens for its cost.

    A row is judged by its own earlier cycles alone, never by what is drafted in this one: the
    decision is non-anticipating (docs/lossless.md), so the output distribution stays exact.

    cost: of one more level (drafting it and verifying it), in units of one target pass. The
    expected tokens of depth k are 1 + sum over levels i <= k of the product of the acceptance
    rates up to i; a rate is hits over trials, of which old ones are forgotten.
    """

    def __init__(self, drafter: Drafter, cost: float = 0.05) -> None:
        super().__init__(drafter)
        self.name, self.cost = f"{drafter.name}+adaptive", cost
        self.level = np.arange(self.max_depth)
        self._clear()

    def _clear(self) -> None:
        """No rows. hits, trials: [B, D] float; proposed: [B] levels of the cycle under way."""
        self.hits = self.trials = np.zeros((0, self.max_depth))
        self.proposed = np.zeros(0, dtype=int)

    def reset(self, rows: int, max_len: int) -> None:
        self._clear()
        self.inner.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        prior = np.full((len(prompts), self.max_depth), PRIOR_WEIGHT)
        self.hits = np.concatenate([self.hits, prior * PRIOR_MEAN])
        self.trials = np.concatenate([self.trials, prior])
        self.proposed = np.concatenate([self.proposed, np.zeros(len(prompts), dtype=int)])
        self.inner.begin(prompts, sampling)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        accepted = n.numpy()[:, None] - 1
        tried = (self.level < self.proposed[rows, None]) & (self.level <= accepted)
        for rates, fresh in ((self.hits, self.level < accepted), (self.trials, 1)):
            rates[rows] = np.where(tried, RATE_MEMORY * rates[rows] + fresh, rates[rows])
        self.proposed[rows] = 0
        self.inner.observe(tokens, feats, n, rows)

    def depths(self) -> np.ndarray:
        """Return [B] the best depth of every row, at least 1: a row that stops drafting would
        never learn that it could again."""
        survive = np.cumprod(self.hits / self.trials, 1)
        gain = (1 + np.cumsum(survive, 1)) / (1 + self.cost * (self.level + 1))
        return gain.argmax(1) + 1

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = self.inner.propose(
            torch.minimum(budget, torch.from_numpy(self.depths())), sampling, rng
        )
        there = torch.arange(tree.width + 1, device=tree.size.device) <= tree.size[:, None]
        self.proposed = torch.where(there, tree.layout.positions, 0).amax(1).cpu().numpy()
        return tree

    def select(self, rows: list[int]) -> None:
        self.hits, self.trials = self.hits[rows], self.trials[rows]
        self.proposed = self.proposed[rows]
        self.inner.select(rows)
