"""Drafters that go around another one: the base of them, one that adapts the draft's length to
what was accepted, one that watches whether drafting pays, and one that drafts nothing where too
many rows are decoded together.

The first two judge each row by its own earlier cycles alone, never by what is drafted in this one:
the decision is non-anticipating (docs/lossless.md), so the output distribution stays exact; and no
row depends on its neighbours in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree

PRIOR_MEAN, PRIOR_WEIGHT, RATE_MEMORY = 0.6, 4.0, 0.95
PATIENCE, RETRY, MEMORY = 24, 96, 0.97
CERTAINTY = 1.64  # standard errors; one-sided 95 %


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


class UpToRows(Wrapped):
    """Wraps any drafter, and drafts nothing where more than `most` rows are decoded together: the
    more rows share a pass, the more of it a drafted token costs.

    The number is that of a whole run (`reset`), so it hangs on nothing that is decoded. on_rest is
    called with it once, where nothing is drafted.
    """

    def __init__(
        self, drafter: Drafter, most: int, on_rest: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(drafter)
        self.whole, self.most, self.on_rest = drafter, most, on_rest
        self.name = drafter.name
        # Of the whole also while it rests: caches are made by it, and a certificate asks whether
        # there is something that could have drafted.
        self.max_nodes = drafter.max_nodes
        self.max_depth = drafter.max_depth

    def reset(self, rows: int, max_len: int) -> None:
        """See Drafter."""
        rests = rows > self.most
        self.inner = NoDraft() if rests else self.whole
        self.inner.reset(rows, max_len)
        if rests and self.on_rest is not None:
            self.on_rest(rows)
            self.on_rest = None


@dataclass(frozen=True)
class Alert:
    """A request that stays below break-even. request: how many were begun before it. cycle:
    drafted cycles by then.

    accepted_length: its running mean, tokens per cycle.
    """

    request: int
    cycle: int
    accepted_length: float
    break_even: float

    def __str__(self) -> str:
        return (
            f"request {self.request}: {self.accepted_length:.2f} tokens per target pass "
            f"after {self.cycle} cycles, "
            f"below the {self.break_even:.2f} at which drafting pays on this machine"
        )


class Monitor(Wrapped):
    """Wraps any drafter. A row stays below break-even when, after `patience` drafted cycles,
    the upper 95 % bound of its running accepted length lies below `break_even` (tokens per
    cycle, at least 1).

    fallback: such a row drafts nothing for `retry` cycles, then gets another `patience` cycles
    to prove itself (0: no second chance). on_alert is called once per request. alerts: all of
    them since the last `reset`. Raises ValueError for a break-even below 1 or a patience below
    1.
    """

    def __init__(
        self,
        drafter: Drafter,
        break_even: float,
        *,
        fallback: bool = False,
        patience: int = PATIENCE,
        retry: int = RETRY,
        on_alert: Callable[[Alert], None] | None = None,
    ) -> None:
        if not break_even >= 1 or patience < 1:
            raise ValueError(
                f"monitor: break-even {break_even} and patience {patience} must be at least 1"
            )
        super().__init__(drafter)
        self.break_even, self.fallback = break_even, fallback
        self.patience, self.retry, self.on_alert = patience, retry, on_alert
        self.name = f"{drafter.name}@monitor"
        self.reset_state()

    def reset_state(self) -> None:
        self.sums = np.zeros(
            (0, 3)
        )  # per row: weight, accepted length, its square; forgetting by MEMORY
        self.cycles = np.zeros(
            0, dtype=int
        )  # drafted cycles since the row began or was given another chance
        self.rest = np.zeros(0, dtype=int)  # plain cycles left; -1: for good
        self.request = np.zeros(0, dtype=int)
        self.reported: set[int] = set()
        self.drafted = np.zeros(0, dtype=bool)  # whether the cycle under way drafted anything
        self.begun = 0
        self.alerts: list[Alert] = []

    def reset(self, rows: int, max_len: int) -> None:
        self.reset_state()
        self.inner.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        n = len(prompts)
        self.sums = np.concatenate([self.sums, np.zeros((n, 3))])
        self.cycles = np.concatenate([self.cycles, np.zeros(n, dtype=int)])
        self.rest = np.concatenate([self.rest, np.zeros(n, dtype=int)])
        self.request = np.concatenate([self.request, self.begun + np.arange(n)])
        self.drafted = np.concatenate([self.drafted, np.zeros(n, dtype=bool)])
        self.begun += n
        self.inner.begin(prompts, sampling)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        for b, length in zip(range(rows.start, rows.stop), n.tolist(), strict=True):
            if self.drafted[b]:
                self.sums[b] = MEMORY * self.sums[b] + (1, length, length * length)
                self.cycles[b] += 1
                self._judge(b)
            elif self.rest[b] > 0:
                self.rest[b] -= 1
            self.drafted[b] = False
        self.inner.observe(tokens, feats, n, rows)

    def _judge(self, b: int) -> None:
        if self.cycles[b] < self.patience:
            return
        weight, total, squares = self.sums[b]
        mean = total / weight
        spread = math.sqrt(max(squares / weight - mean * mean, 0.0) / weight)
        if mean + CERTAINTY * spread >= self.break_even:
            return
        request = int(self.request[b])
        if request not in self.reported:
            self.reported.add(request)
            self.alerts.append(Alert(request, int(self.cycles[b]), float(mean), self.break_even))
            if self.on_alert:
                self.on_alert(self.alerts[-1])
        if self.fallback:
            self.rest[b] = self.retry or -1
            self.sums[b], self.cycles[b] = 0, 0

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """See Drafter; rows that rest get no draft."""
        allowed = torch.from_numpy(np.where(self.rest == 0, self.max_depth, 0))
        tree = self.inner.propose(torch.minimum(budget, allowed), sampling, rng)
        # A row that was allowed to draft and found nothing (an n-gram without a match) made a
        # plain cycle at a plain
        # price: it says nothing about the price of a draft.
        self.drafted = (tree.size > 0).cpu().numpy()
        return tree

    def select(self, rows: list[int]) -> None:
        self.sums, self.cycles, self.rest = self.sums[rows], self.cycles[rows], self.rest[rows]
        self.request, self.drafted = self.request[rows], self.drafted[rows]
        self.inner.select(rows)
