"""One definition of every figure: accepted length, acceptance by position, intervals, loops.

accepted length (tau)   tokens a cycle commits, the bonus token counted: accepted draft tokens
                        + 1. The token drawn at prefill is in no cycle.
unconditional at d      cycles that accepted d levels or more / all cycles.
conditional at d        cycles that accepted d levels or more / cycles that proposed level d
                        and accepted d - 1.
cut cycles              shortened by a stop token or the length limit: counted apart, they say
                        nothing of the drafter.
loop cycles             begin where the last 8 generated tokens have been generated three
                        times: counted apart, since a small model that repeats itself flatters
                        every drafter.
intervals               95 % percentile bootstrap over prompts (cycles of one prompt are not
                        independent), fixed seed.
speed                   tokens per pass over seconds per pass; the seconds as a trimmed mean, for a
                        machine that stalls once would else decide a ratio of sums.

Sources: accepted length as in EAGLE and Spec-Bench ("mean accepted tokens"); docs map it to
the other conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from outrider.decode.engine import Cycle, Generation

LOOP_GRAM, LOOP_TIMES = 8, 3
TRIM = 0.1  # of the units, at either end of their times
RESAMPLES = 2000
AT_ONCE = 1 << 20  # units of resamples: memory does not grow with the prompts


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; low = high = None where fewer than two prompts allow
    none.
    """

    mean: float
    low: float | None
    high: float | None

    def json(self) -> dict:
        return asdict(self)

    def times(self, factor: float) -> Interval:
        """Everything by a positive factor."""
        low, high = (None if x is None else x * factor for x in (self.low, self.high))
        return Interval(self.mean * factor, low, high)


@dataclass(frozen=True)
class Position:
    """Acceptance at draft level `position` (1 = first draft token); trials = cycles that could
    have accepted it.
    """

    position: int
    conditional: Interval
    unconditional: Interval
    trials: int

    def json(self) -> dict:
        rates = {name: getattr(self, name) for name in ("conditional", "unconditional")}
        return {
            "position": self.position,
            **{name: rate.mean for name, rate in rates.items()},
            "trials": self.trials,
            **{f"{name}_interval": rate.json() for name, rate in rates.items()},
        }


def loop_starts(tokens: Sequence[int]) -> list[bool]:
    """[n + 1] bool: have the LOOP_GRAM tokens before place i been seen LOOP_TIMES times by then
    (this one included)?
    """
    seen: dict[tuple[int, ...], int] = {}
    out = [False] * (len(tokens) + 1)
    for end in range(LOOP_GRAM, len(tokens) + 1):
        key = tuple(tokens[end - LOOP_GRAM : end])
        seen[key] = seen.get(key, 0) + 1
        out[end] = seen[key] >= LOOP_TIMES
    return out


@dataclass(frozen=True)
class Split:
    """The cycles of one generation: those that count, and those reported apart."""

    clean: list[Cycle]
    cut: list[Cycle]
    loop: list[Cycle]


def split(generation: Generation) -> Split:
    """Sort the cycles of a generation into clean, cut and loop (a cut cycle inside a loop
    counts as cut).
    """
    looping = loop_starts(generation.token_ids)
    out = Split([], [], [])
    for cycle in generation.cycles:
        (out.cut if cycle.cut else out.loop if looping[cycle.start] else out.clean).append(cycle)
    return out


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0
) -> Interval:
    """sum(numerators) / sum(denominators) over prompts, resampled by prompt. NaN mean when
    nothing was measured.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    used = bottom > 0
    top, bottom = top[used], bottom[used]
    return _resampled(lambda pick: top[pick].sum(-1) / bottom[pick].sum(-1), len(top), seed)


def accepted_length(per_prompt: Iterable[Sequence[Cycle]], seed: int = 0) -> Interval:
    """Mean accepted length over the given cycles, grouped by prompt for the interval."""
    groups = [list(cycles) for cycles in per_prompt]
    return ratio_interval(
        [sum(c.accepted + 1 for c in g) for g in groups], [len(g) for g in groups], seed
    )


def paired_difference(
    a: Sequence[Sequence[Cycle]], b: Sequence[Sequence[Cycle]], seed: int = 0
) -> Interval:
    """Return accepted length of `a` minus that of `b`, both [prompt][cycle] over the same
    prompts, resampled together.

    Raises ValueError when the two do not cover the same number of prompts.
    """
    if len(a) != len(b):
        raise ValueError(f"paired difference: {len(a)} prompts against {len(b)}")
    sums = np.array([[sum(c.accepted + 1 for c in g) for g in side] for side in (a, b)], float)
    counts = np.array([[len(g) for g in side] for side in (a, b)], float)

    def difference(pick: np.ndarray) -> np.ndarray:
        # A resample without a single cycle on one side says nothing; it is left out below as
        # NaN.
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums[:, pick].sum(-1) / counts[:, pick].sum(-1)
        return means[0] - means[1]

    return _resampled(difference, len(a), seed)


@dataclass(frozen=True)
class Work:
    """What one drafter did, by unit (a prompt, or prompts that ran together). tokens, passes:
    decoded, of the target. pass_s: seconds of a pass; NaN where that cannot be trusted, which
    costs the unit its say in times alone."""

    tokens: Sequence[float]
    passes: Sequence[float]
    pass_s: Sequence[float]


def trimmed(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean over the last axis, where the lowest and the highest tenth (at least
    one, of three or more) count as much as their inner neighbour: no single value moves it.
    NaN values are left out; NaN where there is no other."""
    known = np.isfinite(values)
    count = known.sum(-1, keepdims=True)
    tail = np.where(count >= 3, np.ceil(TRIM * count), 0).astype(int)
    ordered = np.sort(values, -1)  # NaN last
    ends = [np.clip(at, 0, values.shape[-1] - 1) for at in (tail, count - 1 - tail)]
    low, high = (np.take_along_axis(ordered, at, -1) for at in ends)
    kept = np.where(known, np.clip(values, low, high), 0.0)
    shares = np.where(known, weights, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (kept * shares).sum(-1) / shares.sum(-1)  # type: ignore[no-any-return]


def rate(work: Work, seed: int = 0) -> Interval:
    """Return tokens per second: tokens per pass over the trimmed seconds of a pass,
    resampled by unit."""
    return speedup(work, Work(work.passes, work.passes, [1.0] * len(work.passes)), seed)


def pass_ratio(work: Work, base: Work, seed: int = 0) -> Interval:
    """Return how long a pass of `work` takes in those of `base`: the trimmed mean of the
    ratios of paired units."""
    return _resampled(_pass_ratio(work, base), len(work.tokens), seed)


def speedup(work: Work, base: Work, seed: int = 0) -> Interval:
    """Return tokens per second of `work` over those of `base`, over paired units: the ratio
    of tokens per pass, which no machine disturbs, over the trimmed mean of the units'
    ratios of seconds per pass."""
    tokens, passes, base_tokens, base_passes = (
        np.asarray(x, float) for x in (work.tokens, work.passes, base.tokens, base.passes)
    )
    slower = _pass_ratio(work, base)

    def statistic(pick: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            more = tokens[pick].sum(-1) / passes[pick].sum(-1)
            return more / (base_tokens[pick].sum(-1) / base_passes[pick].sum(-1)) / slower(pick)

    return _resampled(statistic, len(tokens), seed)


def _pass_ratio(work: Work, base: Work) -> Callable[[np.ndarray], np.ndarray]:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.asarray(work.pass_s, float) / np.asarray(base.pass_s, float)
    passes = np.asarray(work.passes, float)
    return lambda pick: trimmed(ratios[pick], passes[pick])


def _resampled(statistic: Callable[[np.ndarray], np.ndarray], count: int, seed: int) -> Interval:
    if count == 0:
        return Interval(float("nan"), None, None)
    mean = float(statistic(np.arange(count)[None])[0])
    if count < 2:
        return Interval(mean, None, None)
    rng, most = np.random.default_rng(seed), max(1, AT_ONCE // count)
    sizes = (min(most, RESAMPLES - done) for done in range(0, RESAMPLES, most))
    values = np.concatenate([statistic(rng.integers(0, count, (size, count))) for size in sizes])
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(mean, None, None)
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(mean, float(low), float(high))


def acceptance_by_position(per_prompt: Sequence[Sequence[Cycle]], seed: int = 0) -> list[Position]:
    """Return acceptance at every level that some cycle proposed, resampled by prompt."""
    out = []
    for d in range(1, max((c.proposed for g in per_prompt for c in g), default=0) + 1):
        hits = [sum(c.accepted >= d for c in g) for g in per_prompt]
        trials = [sum(c.proposed >= d and c.accepted >= d - 1 for c in g) for g in per_prompt]
        conditional = ratio_interval(hits, trials, seed)
        unconditional = ratio_interval(hits, [len(g) for g in per_prompt], seed)
        out.append(Position(d, conditional, unconditional, sum(trials)))
    return out
