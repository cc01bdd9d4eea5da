"""The base of drafters that go around another one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from decode.drafter import Drafter
from decode.rng import Rng
from decode.sampling import Sampling
from decode.tree import DraftTree


class Wrapped:
    """Does and has what `inner` does and has; a subclass says what it does otherwise. See
    decode.drafter.Drafter."""

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
