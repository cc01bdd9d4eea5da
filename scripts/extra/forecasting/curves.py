"""Accepted length after so many training tokens: measured learning curves of a family, scaled
by a pilot.

An accepted length is turned into the acceptance rate a at which a chain of the head's depth
reaches it under independence (scripts/tuning/cost.py), and y = log(1 - a), the log of the
rejection rate, is taken as a straight line over log tokens: a power distribution, as losses follow.
Measured curves keep to it within 0.03 in y. On other prompts the whole line is multiplied:

    y(tokens) = s * (level - slope * log tokens),   s from the pilot's y over the line's there

log s is drawn towards 0 (the prompts of the measured curve) by a prior of standard deviation
0.5: an untrained pilot says nothing, a pilot of some minutes nearly everything. (A first rule
moved the line instead of multiplying it: docs/results/forecast-first-truth.json has its misses.)

A 90 % interval is 1.645 standard deviations of y. Tokens in these formulas count
whether supervised or not, as tokens_seen of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.conf.errors import UserError
from outrider.scripts.common.files import here
from outrider.scripts.tuning.cost import acceptance_needed, expected_tokens

Z90, Z95 = 1.6449, 1.96
LEAST_RESIDUAL = 0.01  # four points on a line by chance are no certainty
UNKNOWN_SLOPE, UNKNOWN_SPREAD = 0.14, 0.06  # of a family without a curve: mean and spread of ours
PRIOR = 0.5  # of log s: how far prompts differ from those of the curves
MISFIT = 0.08  # of y: what multiplying leaves open
LEAST_Y = 0.02  # below this nothing was accepted
NEAR = 0.999  # acceptance that counts as certain

REUSE = np.geomspace(0.25, 64, 97)  # worth of all further passes, in first ones, that is tried


@dataclass(frozen=True)
class Length:
    """An accepted length with its interval (90 % for forecasts)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class CurveFamily:
    """The line of a measured curve: y = level - slope * log(tokens / 1e6). residual: standard
    deviation of the points around it. slope_error: of the slope. noise: standard deviation of
    y by the choice of prompts. depth: levels of the draft."""

    name: str
    depth: int
    level: float
    slope: float
    slope_error: float
    residual: float
    noise: float


@dataclass(frozen=True)
class PilotRun:
    """A short run: what it read and what it decoded with. length: mean and 95 % interval."""

    name: str
    kind: str
    depth: int
    tokens: float
    tokens_per_second: float
    length: Length


def rejection(length: float, depth: int) -> float:
    """y of an accepted length (bonus token counted)."""
    rate = acceptance_needed(max(length, 1.0), depth)
    return math.log(1 - min(NEAR if rate is None else rate, NEAR))


def length_of(y: float, depth: int) -> float:
    """The accepted length of y."""
    return expected_tokens(1 - math.exp(min(y, 0.0)), depth)


def families(path: Path, depths: dict[str, int]) -> dict[str, CurveFamily]:
    """The lines of the runs in a file such as docs/results/recipes.json. depths: levels of the
    drafts of each. Raises UserError for a file of another form."""
    try:
        runs = json.loads(here(path).read_text(encoding="utf-8"))["runs"]
        return {
            name: _fitted(name, runs[name]["points"], depth)
            for name, depth in depths.items()
            if name in runs and len(runs[name]["points"]) > 2
        }
    except OSError as error:
        raise UserError(
            f"curves: cannot read {path} ({error.strerror}); give a file such as "
            "docs/results/recipes.json"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"curves: {path} is of another form; give a file such as docs/results/recipes.json"
        ) from None


def _fitted(name: str, points: Sequence[dict[str, Any]], depth: int) -> CurveFamily:
    tokens, lengths = (
        [float(p[key]) for p in points] for key in ("tokens_seen", "accepted_length")
    )
    if not all(0 < known < math.inf for known in [*tokens, *lengths]):
        raise ValueError(f"{name}: a point is not a positive number")
    x = np.log(np.array(tokens) / 1e6)
    y = np.array([rejection(length, depth) for length in lengths])
    slope, level = np.polyfit(x, y, 1)
    residual = max(float(np.std(y - (level + slope * x), ddof=2)), LEAST_RESIDUAL)
    error = residual / max(float(np.sqrt(((x - x.mean()) ** 2).sum())), 1e-9)
    noise = float(np.median([_spread(p["low"], p["high"], depth) for p in points]))
    return CurveFamily(name, depth, float(level), -float(slope), error, residual, noise)


def _spread(low: float | None, high: float | None, depth: int) -> float:
    """Standard deviation of y behind a 95 % interval of a length."""
    if low is None or high is None:
        return 0.2
    return abs(rejection(low, depth) - rejection(high, depth)) / (2 * Z95)


def forecast(
    pilot: PilotRun, family: CurveFamily | None, others: Sequence[CurveFamily], tokens: float
) -> Length:
    """The accepted length after `tokens`, with its 90 % interval. others: all families with a
    curve; how much their slopes differ says how far one can be trusted elsewhere."""
    slopes = [f.slope for f in others]
    spread = float(np.std(slopes, ddof=1)) if len(slopes) > 1 else UNKNOWN_SPREAD
    depth, start = pilot.depth, rejection(pilot.length.mean, pilot.depth)
    # Half: the same prompts are asked later. Answers that were all accepted alike leave an
    # interval without width, and are still no certainty.
    prompts = max(0.5 * _spread(pilot.length.low, pilot.length.high, depth), LEAST_RESIDUAL)
    further = math.log(tokens / pilot.tokens)
    if family is None:
        slope = float(np.mean(slopes)) if slopes else UNKNOWN_SLOPE
        deviation = math.hypot(2 * LEAST_RESIDUAL, spread * further, prompts, MISFIT * start)
        return _length(start - slope * further, deviation, depth)
    then, now = (min(_line(family, t), -LEAST_Y) for t in (tokens, pilot.tokens))
    own = max(-start, LEAST_Y)
    uncertain = math.hypot(family.slope_error, spread / 2) * further
    parts = (2**0.5 * family.residual / then, prompts / own, uncertain / then, MISFIT)
    variance = sum(part**2 for part in parts)
    weight = PRIOR**2 / (PRIOR**2 + variance)
    scale = math.exp(weight * math.log(own / -now))
    return _length(scale * then, abs(scale * then) * math.sqrt(weight * variance), depth)


def _line(family: CurveFamily, tokens: float) -> float:
    return family.level - family.slope * math.log(tokens / 1e6)


def _length(y: float, deviation: float, depth: int) -> Length:
    return Length(
        length_of(y, depth),
        length_of(y + Z90 * deviation, depth),
        length_of(y - Z90 * deviation, depth),
    )


# -- tokens that are read again


def effective(tokens: float, unique: float, reuse: float) -> float:
    """New tokens that are worth as much as `tokens` of which `unique` are different: the worth of
    further passes falls off as an exponential and comes to `reuse` first ones at most (the form of
    Muennighoff et al. 2023)."""
    if tokens <= unique:
        return tokens
    return unique * (1 + reuse * (1 - math.exp(-(tokens / unique - 1) / reuse)))


def worth(unique: float, scaling: Path) -> Callable[[float], float]:
    """tokens -> the new tokens that they are worth, of `unique` different ones; 0: all are new.
    Raises UserError where `scaling`, a report of scripts/lab/data_scaling.py, does not say it."""
    if not unique:
        return lambda tokens: tokens
    try:
        reuse = float(json.loads(here(scaling).read_text(encoding="utf-8"))["reuse"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"unique: {scaling} does not say what a further pass is worth; give scaling=REPORT of "
            "scripts/lab/data_scaling.py, or leave unique out"
        ) from None
    return lambda tokens: effective(tokens, unique, reuse)


def fit_reuse(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """{level, slope, reuse, residual} of y = level - slope * log(effective tokens / 1e6) through
    heads with tokens_seen, unique_tokens, mean (accepted length) and depth."""
    y = np.array([rejection(point["mean"], point["depth"]) for point in points])
    found: list[tuple[float, float, float, float]] = []
    for reuse in REUSE.tolist():
        worth = [effective(p["tokens_seen"], p["unique_tokens"], reuse) for p in points]
        x = np.log(np.array(worth) / 1e6)
        slope, level = np.polyfit(x, y, 1)
        error = float(((y - level - slope * x) ** 2).sum())
        found.append((error, float(level), -float(slope), reuse))
    error, level, slope, reuse = min(found)
    residual = math.sqrt(error / max(len(points) - 3, 1))
    residual = max(residual, LEAST_RESIDUAL)
    return {"level": level, "slope": slope, "reuse": reuse, "residual": residual}


def foretell(points: Sequence[dict[str, Any]], unique: float, passes: int) -> Length:
    """The accepted length after `passes` over `unique` tokens, with its 90 % interval: residuals,
    and how far the prediction moves when one head is left out."""

    def at(some: Sequence[dict[str, Any]]) -> float:
        fitted = fit_reuse(some)
        worth = effective(passes * unique, unique, fitted["reuse"])
        return fitted["level"] - fitted["slope"] * math.log(worth / 1e6)

    count = len(points)
    moved = [at([*points[:i], *points[i + 1 :]]) for i in range(count)]
    spread = math.sqrt((count - 1) / count * sum((y - at(points)) ** 2 for y in moved))
    deviation = math.hypot(fit_reuse(points)["residual"], spread)
    freedom = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02}.get(count - 3, 1.9)  # of Student's t
    return _length(at(points), deviation * freedom / Z90, points[0]["depth"])
