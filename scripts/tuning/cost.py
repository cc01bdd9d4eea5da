"""What a cycle costs and what it brings: latencies fitted to measurements, never assumed, and
tokens/s from them.

A cycle is: propose, one target pass over the last token and the draft, distribution and
verification, cache, Python. Its time is the sum of fitted parts (`CostModel.cycle`); with
acceptance by position and rank, or with replayed cycles (scripts/tuning/replay.py), it gives
tokens/s, speedup and the break-even accepted length of any K, tree and batch.

At the end stands what the literature has in closed form, for draft tokens that are accepted
independently with one probability: a way to compare accepted lengths of chains of unlike depth.

Shape letters: none; everything is small and on the host. Times are milliseconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.heads.tuned import DraftSettings


@dataclass(frozen=True)
class Curve:
    """Milliseconds over nodes, for each measured batch size: piecewise linear through medians.

    knots[B]: ascending (nodes, ms). Between batch sizes the two nearest curves are
    interpolated; beyond the last knot the last slope goes on.
    """

    knots: dict[int, list[tuple[float, float]]]

    @staticmethod
    def fit(samples: Iterable[tuple[int, int, float]], rising: bool = True) -> Curve:
        """samples: (batch, nodes, ms). rising: a larger tree is never cheaper (pool adjacent
        violators); else every measured point is its own median.

        Raises ValueError without samples."""
        groups: dict[int, dict[int, list[float]]] = {}
        for batch, nodes, ms in samples:
            groups.setdefault(batch, {}).setdefault(nodes, []).append(ms)
        if not groups:
            raise ValueError("curve: nothing was measured")
        knots = {}
        for batch, by_nodes in sorted(groups.items()):
            places = sorted(by_nodes)
            medians = [float(np.median(by_nodes[n])) for n in places]
            if rising:
                medians = isotonic(medians, [len(by_nodes[n]) for n in places])
            knots[batch] = [(float(n), ms) for n, ms in zip(places, medians, strict=True)]
        return Curve(knots)

    def __call__(self, batch: int, nodes: float) -> float:
        sizes = list(self.knots)
        if batch <= sizes[0] or len(sizes) == 1:
            return _along(self.knots[sizes[0]], nodes)
        low, high = _bracket(sizes, batch)
        a, b = _along(self.knots[low], nodes), _along(self.knots[high], nodes)
        return max(a + (b - a) * (batch - low) / (high - low), 0.0)

    def line(self, batch: int) -> tuple[float, float]:
        """(ms of a single token, ms per further node): the straight line nearest to the knots
        of a batch size.
        """
        x, y = np.array(self.knots[batch], float).T
        if len(x) < 2:
            return float(y[0]), 0.0
        slope, start = np.polyfit(x, y, 1)
        return float(start), float(slope)

    def to_json(self) -> dict[str, Any]:
        return {str(b): [list(k) for k in knots] for b, knots in self.knots.items()}


@dataclass(frozen=True)
class LinearCost:
    """ms = weights . features, no weight below zero (a part of a cycle cannot cost less than
    nothing).
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]

    @staticmethod
    def fit(
        rows: Sequence[dict[str, float]], ms: Sequence[float], names: Sequence[str]
    ) -> LinearCost:
        """Non-negative least squares of relative errors."""
        y = np.asarray(ms, float)
        table = np.array([[row.get(n, 0.0) for n in names] for row in rows], float)
        relative = table / np.maximum(y, 1e-9)[:, None]
        return LinearCost(tuple(names), tuple(nonnegative(relative, np.ones(len(y))).tolist()))

    def __call__(self, **features: float) -> float:
        return sum(w * features.get(n, 0.0) for n, w in zip(self.names, self.weights, strict=True))

    def to_json(self) -> dict[str, float]:
        return dict(zip(self.names, self.weights, strict=True))


@dataclass(frozen=True)
class CycleShape:
    """What a cycle's price depends on. depth: levels drafted. width: nodes expanded per level.
    nodes: verified.
    """

    depth: int
    nodes: int
    width: int = 1

    @staticmethod
    def of(settings: DraftSettings) -> CycleShape:
        """What a full draft of `settings` costs by."""
        depth = settings.depth or 0
        if settings.shape == "chain":
            return CycleShape(depth, depth)
        return CycleShape(depth, settings.nodes or 0, settings.width or 1)

    def features(self) -> dict[str, float]:
        """What the drafter's time is fitted to. passes: levels after the first; expanded:
        tokens read in them.
        """
        passes = max(self.depth - 1, 0)
        return {"one": 1.0, "passes": passes, "expanded": passes * self.width, "nodes": self.nodes}


PROPOSE = ("one", "passes", "expanded", "nodes")
OBSERVE = ("one", "tokens")
PARTS = ("target", "drafter", "distribution and verification", "cache", "Python")


class CyclePrice(NamedTuple):
    """Milliseconds of one cycle by part (PARTS)."""

    target: float
    drafter: float
    verify: float
    cache: float
    python: float

    @property
    def ms(self) -> float:
        return sum(self)

    def to_json(self) -> dict[str, float]:
        return dict(zip(PARTS, self, strict=True))


NOTHING = CycleShape(0, 0)


@dataclass(frozen=True)
class CostModel:
    """Fitted parts. target, verify, cache, python: of the loop itself. propose, observe: of
    one drafter, by kind ("chain", "tree") and batch size. extra: kind -> what cycles of that
    kind took beyond the parts' sum, per level (verification deeper than the root, commits of
    several tokens): fitted on calibration runs.
    """

    target: Curve
    verify: Curve
    cache: Curve
    python: Curve
    propose: dict[str, dict[int, LinearCost]] = field(default_factory=dict)
    observe: dict[str, dict[int, LinearCost]] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)

    def cycle(
        self, batch: int, shape: CycleShape, kind: str = "none", tokens: float = 1.0
    ) -> CyclePrice:
        """One cycle of `batch` rows, each with a draft of `shape`, of which `tokens` a row are
        committed.
        """
        nodes, drafter = shape.nodes, 0.0
        if kind in self.propose:
            if shape.depth:
                drafter += _nearest(self.propose[kind], batch)(**shape.features())
            drafter += self.observing(batch, kind, tokens)
        return CyclePrice(
            self.target(batch, nodes),
            drafter,
            self.verify(batch, nodes) + self.extra.get(kind, 0.0) * shape.depth,
            self.cache(batch, nodes),
            self.python(batch, nodes),
        )

    def observing(self, batch: int, kind: str, tokens: float) -> float:
        """Milliseconds in which a drafter takes in `tokens` a row."""
        return _nearest(self.observe[kind], batch)(one=1.0, tokens=tokens)

    def plain(self, batch: int = 1) -> float:
        """Milliseconds of a cycle of plain decoding."""
        return self.cycle(batch, NOTHING).ms

    def break_even(self, batch: int, shape: CycleShape, kind: str, tokens: float = 1.0) -> float:
        """Accepted length (tokens per cycle, bonus included) at which drafting is as fast as
        plain decoding.
        """
        return max(self.cycle(batch, shape, kind, tokens).ms / self.plain(batch), 1.0)

    def predict(
        self, batch: int, shape: CycleShape, kind: str, accepted_length: float
    ) -> dict[str, Any]:
        """Tokens per second of `batch` rows that commit `accepted_length` tokens per cycle."""
        price = self.cycle(batch, shape, kind, accepted_length)
        plain = self.plain(batch)
        return {
            "accepted_length": accepted_length,
            "cycle_ms": price.ms,
            "parts_ms": price.to_json(),
            "tokens_per_second": 1000 * batch * accepted_length / price.ms,
            "speedup": accepted_length * plain / price.ms,
            "break_even": max(price.ms / plain, 1.0),
        }

    def to_json(self) -> dict[str, Any]:
        drafter = {
            part: {
                k: {str(b): f.to_json() for b, f in by.items()}
                for k, by in getattr(self, part).items()
            }
            for part in ("propose", "observe")
        }
        loop = {
            part: getattr(self, part).to_json() for part in ("target", "verify", "cache", "python")
        }
        lines = {str(b): self.target.line(b) for b in self.target.knots}
        return {
            **loop,
            **drafter,
            "extra_ms_per_level": self.extra,
            "target_line": {b: {"ms": a, "ms_per_node": s} for b, (a, s) in lines.items()},
        }


# -- from acceptance tables to accepted length


def length_of_chain(unconditional: Sequence[float], k: int) -> float:
    """Accepted length of a chain of k: one plus the chance of reaching every level.
    unconditional[d]: cycles that accept d + 1 levels or more, as a share of all cycles
    (report.json's acceptance_by_position)."""
    return 1.0 + sum(unconditional[:k])


# -- fits


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence in weighted least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []  # value, weight, members
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, v, n), (b, w, m) = blocks[-2:]
            blocks[-2:] = [[(a * v + b * w) / (v + w), v + w, n + m]]
    return [value for value, _, members in blocks for _ in range(int(members))]


def nonnegative(table: np.ndarray, y: np.ndarray, rounds: int = 2000) -> np.ndarray:
    """Non-negative least squares by coordinate descent; columns of zeros get weight 0."""
    norms = (table**2).sum(0)
    weights = np.zeros(table.shape[1])
    rest = y - table @ weights
    for _ in range(rounds):
        before = weights.copy()
        for j, norm in enumerate(norms):
            if norm <= 0:
                continue
            new = max(weights[j] + table[:, j] @ rest / norm, 0.0)
            rest -= (new - weights[j]) * table[:, j]
            weights[j] = new
        if np.abs(weights - before).max(initial=0.0) <= 1e-9 * max(
            np.abs(weights).max(initial=0.0), 1e-12
        ):
            break
    return weights


def _along(knots: Sequence[tuple[float, float]], nodes: float) -> float:
    if len(knots) == 1:
        return knots[0][1]
    low, high = _bracket([x for x, _ in knots], nodes)
    have = dict(knots)
    slope = (have[high] - have[low]) / (high - low)
    return max(have[low] + slope * (nodes - low), 0.0)


def _bracket(places: Sequence[Any], x: float) -> tuple[Any, Any]:
    at = min(max(bisect.bisect_right(places, x), 1), len(places) - 1)
    return places[at - 1], places[at]


def _nearest(by_batch: dict[int, LinearCost], batch: int) -> LinearCost:
    return by_batch[min(by_batch, key=lambda b: (abs(b - batch), b))]


# -- accepted length under independence


def expected_tokens(a: float, k: int) -> float:
    """Expected tokens per cycle, bonus included, of a chain of k whose tokens are accepted
    independently with probability a: (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2022, eq. 1)."""
    return float(k + 1) if a >= 1 else (1 - a ** (k + 1)) / (1 - a)


def acceptance_needed(length: float, k: int) -> float | None:
    """The acceptance rate at which a chain of k reaches an accepted length under independence;
    None when none does.
    """
    if length <= 1:
        return 0.0
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < length else (low, middle)
    return high
