"""Tests that may be looked at after every batch: bets on sums of known variance.

Let x_t have mean 0 and variance v_t given the past. Since exp(y - y^2 / 6) <= 1 + y + y^2 / 3
for every y (Delyon 2009),

    exp(c x_t - c^2 (x_t^2 + 2 v_t) / 6)

has a mean of 1 at most, whatever the distribution of x_t: no bound, no limit theorem. Its
product over t ever reaches 1 / a with probability a at most (Ville 1939), for each stake c and
for any average over stakes, signs, streams and beginnings. A sum that drifts by d standard
deviations a token is found after about 2 log(1 / a) / d^2 tokens.

tolerance: t standard deviations by which the mean may be off without being named, and 3 t by
which the variance may: then c (|x_t| - t sqrt(v_t)) is bet on, with (1 + 3 t) v_t.

numpy alone. Shape letters: n values, S streams, C stakes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

STAKES = np.geomspace(1 / 1024, 1, 11)


@dataclass(frozen=True)
class Stream:
    """Values of mean 0 under the null hypothesis, [n] each. variance: of every value, known
    before it."""

    values: np.ndarray
    variance: np.ndarray


class Bets:
    """A two-sided test of several streams that grow batch by batch, at one false-alarm rate.

    A stream may go wrong late: each batch begins a bet of its own beside the older ones, the
    k-th with the share 1 / (k (k + 1)) of the start money. p: the smallest so far of 1 / (what
    the money has become), a p-value at any time.
    """

    def __init__(self, names: Sequence[str], tolerance: float = 0.0) -> None:
        self.names, self.tolerance = list(names), tolerance
        self.batches, self.p = 0, 1.0
        self.wealth = np.full((len(self.names), 2, len(STAKES)), -np.inf)  # logarithms
        self.sums = np.zeros((3, len(self.names)))  # n, sum of values, sum of variances

    def add(self, streams: Mapping[str, Stream]) -> float:
        """The next batch; a stream may be absent from it. Returns p."""
        self.batches += 1
        share = -math.log(self.batches * (self.batches + 1))
        self.wealth = np.logaddexp(self.wealth, share)
        for name, stream in streams.items():
            self._bet(self.names.index(name), stream)
        start = math.log(self.wealth.size)
        self.p = min(self.p, math.exp(-max(float(_total(self.wealth)) - start, 0.0)))
        return self.p

    def _bet(self, at: int, stream: Stream) -> None:
        x, v = np.asarray(stream.values, float), np.asarray(stream.variance, float)
        allowed, wide = self.tolerance * np.sqrt(v).sum(), (1 + 3 * self.tolerance) * v.sum()
        total = x.sum()
        mean = np.array([total, -total])[:, None] - allowed
        squares = [((s * x - self.tolerance * np.sqrt(v)) ** 2).sum() for s in (1, -1)]
        spread = (np.array(squares)[:, None] + 2 * wide) / 6
        self.wealth[at] += STAKES * mean - STAKES**2 * spread
        self.sums[:, at] += len(x), total, v.sum()

    def largest(self) -> str:
        """The stream that has won most."""
        return self.names[int(np.argmax(_total(self.wealth, (1, 2))))]

    def shift(self, name: str) -> float:
        """By how many standard deviations a stream's values are off on average."""
        n, total, variance = self.sums[:, self.names.index(name)]
        return float(total / math.sqrt(n * variance)) if n * variance > 0 else 0.0


def _total(logarithms: np.ndarray, axis: tuple[int, ...] | None = None) -> np.ndarray:
    return np.logaddexp.reduce(logarithms, axis=axis)
