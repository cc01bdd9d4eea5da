"""How long a step takes: the plan of training itself (train/texts) over rows of drawn lengths, and
seconds of a pass by its size, which follow from a few passes that are counted (count.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.train.texts.batches import BatchPlan
from outrider.train.texts.sharing import Limits, laid

Size = tuple[float, float, float, float]
Pair = tuple[float, float]  # seconds: of the target, of the head


def sizes(lengths: Sequence[int], pack: int) -> Size:
    """What the time of a pass over rows of these lengths follows from: that it is one, its
    computed positions, its tokens, and its pairs of positions that attend to each other."""
    sequences, width = laid(lengths, pack)
    count = len(sequences)
    return 1.0, float(count * width), float(sum(lengths)), float(count * width**2)


def trials(positions: int, longest: int, rows: int) -> list[list[int]]:
    """Rows of the passes that are counted, four for the four figures of `sizes`: long rows,
    short ones, very unequal ones as many as a pass holds, and a short one alone. positions: of
    a pass at most. longest: tokens of a row. rows: of a pass at most."""

    def alike(part: int, shortest: float) -> list[int]:
        width = max(8, longest // part)
        count = max(1, min(rows, positions // width))
        grown = [shortest + (1 - shortest) * (i + 1) / count for i in range(count)]
        return [max(4, int(width * share)) for share in grown]

    return [alike(2, 0.9), alike(8, 0.9), alike(4, 0.1), [max(8, longest // 8)]]


def fitted(counted: Sequence[Size], seconds: Sequence[float]) -> Size:
    """What each of `sizes` costs, none below 0, such that the largest part of any
    pass that is wrong is small: least squares of shares, over every choice of what costs anything.
    """
    x, y = torch.tensor(counted, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    scale = x.max(0).values
    a, one = x / scale / y[:, None], torch.ones_like(y)
    best, least = torch.zeros(4, dtype=torch.float64), float("inf")
    for count in range(1, 5):
        for some in itertools.combinations(range(4), count):
            cost = torch.linalg.lstsq(a[:, list(some)], one, driver="gelsd").solution
            wrong = float((a[:, list(some)] @ cost - one).square().sum())
            if bool((cost >= 0).all()) and wrong < least - 1e-12:
                best, least = torch.zeros_like(best), wrong
                best[list(some)] = cost
    a, b, c, d = (best / scale).tolist()
    return a, b, c, d


@dataclass(frozen=True)
class PlannedStep:
    """Of a step on average, in seconds unless said otherwise.

    target, head: of a rank's passes. waiting: of a rank for the slowest one. tokens: real ones of
    all ranks. passes: of a rank. padding: share of the computed positions. slowest: the passes of
    the slowest rank by those of a mean one.
    """

    target: float
    head: float
    waiting: float
    tokens: float
    passes: float
    padding: float

    @property
    def seconds(self) -> float:
        """Until the last rank is through its passes."""
        return self.target + self.head + self.waiting

    @property
    def slowest(self) -> float:
        return self.seconds / (self.target + self.head)


def step_of(
    plan: BatchPlan, steps: int, ranks: int, limits: Limits, cost: Callable[[Size], Pair]
) -> PlannedStep:
    """The first steps of a plan. cost: of a pass of such a size."""
    target = head = longest = real = padded = count = 0.0
    for step in range(steps):
        times: list[list[Pair]] = []
        for share in plan.shares(step, ranks, limits):
            passes = [sizes(plan.rows.lengths[part].tolist(), limits.pack) for part in share]
            times.append([cost(size) for size in passes])
            padded, real = padded + sum(s[1] for s in passes), real + sum(s[2] for s in passes)
            count += len(passes)
        target += sum(t for share in times for t, _ in share) / ranks
        head += sum(h for share in times for _, h in share) / ranks
        if limits.together:  # all wait for the slowest in every pass
            longest += sum(max(map(sum, together)) for together in zip(*times, strict=True))
        else:
            longest += max(sum(map(sum, share)) for share in times)
    waiting = max(0.0, longest - target - head) / steps
    mean = (target / steps, head / steps, waiting, real / steps)
    return PlannedStep(*mean, count / steps / ranks, 1 - real / padded)
