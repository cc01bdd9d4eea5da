"""Drafters that go around another one: the base of them, and one that adapts the draft's length to
what was accepted.

It judges each row by its own earlier cycles alone, never by what is drafted in this one:
the decision is non-anticipating (docs/lossless.md), so the output distribution stays exact; and no
row depends on its neighbours in the batch.
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

PRIOR_MEAN, PRIOR_WEIGHT, RATE_MEMORY = 0.6, 4.0, 0.95


class Wrapped:
    """Does and has what `inner` does and has; a subclass says what it does otherwise. See
    decode.drafters.Drafter."""

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

    def reset(self, rows: int, max_len: int) -> None:
        """See Drafter."""
        self.inner.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """See Drafter."""
        self.inner.begin(prompts, sampling)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """See Drafter."""
        self.inner.observe(tokens, feats, n, rows)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """See Drafter."""
        return self.inner.propose(budget, sampling, rng)

    def select(self, rows: list[int]) -> None:
        """See Drafter."""
        self.inner.select(rows)


class Adaptive(Wrapped):
    """Wraps any drafter and lowers its budget per row.

    cost: what one more level costs (drafting it and verifying it), in units of one target
    pass. The expected tokens of depth k are 1 + sum over levels i <= k of the product of the
    acceptance rates up to i.
    """

    def __init__(self, drafter: Drafter, cost: float = 0.05) -> None:
        super().__init__(drafter)
        self.name, self.cost = f"{drafter.name}+adaptive", cost
        self.reset_state()

    def reset_state(self) -> None:
        self.hits = np.zeros((0, self.max_depth))
        self.trials = np.zeros((0, self.max_depth))
        self.proposed = np.zeros(
            0, dtype=int
        )  # levels proposed in the cycle under way; -1 for rows that just began

    def reset(self, rows: int, max_len: int) -> None:
        self.reset_state()
        self.inner.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        fresh = np.zeros((len(prompts), self.max_depth))
        self.hits = np.concatenate([self.hits, fresh + PRIOR_MEAN * PRIOR_WEIGHT])
        self.trials = np.concatenate([self.trials, fresh + PRIOR_WEIGHT])
        self.proposed = np.concatenate([self.proposed, np.full(len(prompts), -1)])
        self.inner.begin(prompts, sampling)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        level = np.arange(self.max_depth)
        for b, count in zip(range(rows.start, rows.stop), n.tolist(), strict=True):
            levels, accepted = self.proposed[b], count - 1
            if levels > 0:
                tried = (level < levels) & (level <= accepted)
                self.hits[b] = np.where(
                    tried, RATE_MEMORY * self.hits[b] + (level < accepted), self.hits[b]
                )
                self.trials[b] = np.where(tried, RATE_MEMORY * self.trials[b] + 1, self.trials[b])
            self.proposed[b] = 0
        self.inner.observe(tokens, feats, n, rows)

    def depths(self) -> np.ndarray:
        """[B] best depth of every row, at least 1: a row that stops drafting would never learn
        that it could again.
        """
        survive = np.cumprod(self.hits / self.trials, 1)
        gain = (1 + np.cumsum(survive, 1)) / (1 + self.cost * np.arange(1, self.max_depth + 1))
        return gain.argmax(1) + 1

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        wanted = torch.minimum(budget, torch.from_numpy(self.depths()))
        tree = self.inner.propose(wanted, sampling, rng)
        if tree.width:
            used = torch.arange(tree.width, device=tree.size.device) < tree.size[:, None]
            self.proposed = torch.where(used, tree.layout.depth + 1, 0).amax(1).cpu().numpy()
        else:
            self.proposed = np.zeros(len(self.hits), dtype=int)
        return tree

    def select(self, rows: list[int]) -> None:
        self.hits, self.trials, self.proposed = (
            self.hits[rows],
            self.trials[rows],
            self.proposed[rows],
        )
        self.inner.select(rows)
