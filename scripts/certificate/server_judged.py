"""What the tests of a server's answers (server_tests.py) come to: a three-valued verdict, in a
line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.scripts.certificate.server_places import (
    ROUNDED,
    JudgedAnswer,
    Places,
    places,
    powered,
)
from outrider.scripts.certificate.server_tests import (
    AGAIN,
    TEMPERATURE,
    beyond_bets,
    exponent,
    moments,
    run_tests,
    together,
    uniform_tests,
)
from outrider.scripts.certificate.uniformity import Test, overall

ALPHA = 1e-3
FEWEST = 400  # judged tokens below which nothing is decided in favour of a server
APART = 1e-2  # p of the fewest answers at a time above which they show nothing
WIDEST = 1.0  # so is nothing where a temperature off by more than this share might pass


@dataclass(frozen=True)
class Measured:
    """A temperature: asked for, most likely, and the ends of its 99 % interval. error: share
    by which it could be off and surely be found. p: of this temperature's own tests."""

    requested: float
    likely: float
    low: float
    high: float
    error: float
    p: float


def judged(
    answers: Sequence[JudgedAnswer], best: int, alpha: float = ALPHA, seed: int = 0
) -> dict[str, Any]:
    """verdict ("passed", "rejected", "undecided"), line, and what they rest on, as JSON."""
    known = places(answers, best)
    found = run_tests(answers, known, best, seed) if len(known.most) else []
    heats, p = measured(known, found, alpha), together(found)
    levels = {
        int(n): overall([t for t in found if t.stratum == f"{n} at a time"])
        for n in np.unique(known.level)
    }
    rejected = p < alpha
    cold = rejected and any(heat.p < alpha for heat in heats) and _explained(known, heats, seed)
    differs = rejected and not cold and _depends(levels, alpha)
    why = _why(found[0], heats if cold else [], levels if differs else {}) if rejected else ""
    few = len(known.own) < FEWEST or not min((h.error for h in heats), default=0) <= WIDEST
    verdict = "rejected" if rejected else "undecided" if few else "passed"
    batch = "yes" if differs else "no sign of it" if len(levels) > 1 else "not tested"
    return {
        "verdict": verdict,
        "line": _line(verdict, known, heats, why, p),
        "temperature": [vars(heat) for heat in heats],
        "temperature_honoured": all(heat.p >= alpha for heat in heats) if heats else None,
        "distribution_is_the_models": None if few and not rejected else not rejected,
        "depends_on_the_batch": batch,
        "most_at_a_time": max(levels, default=1),
        "p": p,
        "p_by_level": levels,
        "alpha": alpha,
        "tokens": len(known.most),
        "judged": len(known.own),
        "beyond": int(known.beyond.sum()),
        "ignored": sorted(known.ignored),
        "why": why,
        "tests": [vars(test) for test in found],
    }


def measured(known: Places, found: Sequence[Test], alpha: float) -> list[Measured]:
    """Every temperature that was asked for."""
    out = []
    heats = list(dict.fromkeys(known.temperature.tolist()))  # as they were asked for
    needed = math.sqrt(2 * math.log(9 * max(len(found), 1) / alpha)) + 2.33
    for heat in heats:
        mask = known.temperature == heat
        b, low, high = exponent(known.logs[mask], known.own[mask])
        spread = float(moments(known.logs[mask])[1].sum())
        error = needed / math.sqrt(spread) if spread > 0 else math.inf
        stratum = f"temperature {heat:g}" if len(heats) > 1 else "all tokens"
        some = [t.p for t in found if t.stratum == stratum and t.name == TEMPERATURE]
        p = min(1.0, len(found) * min(some, default=1.0))
        coldest, hottest = (heat / x if x > 0 else math.inf for x in (high, low))
        out.append(Measured(heat, heat / b, coldest, hottest, error, p))
    return out


def _explained(known: Places, heats: Sequence[Measured], seed: int) -> bool:
    """Whether the tokens are draws at the temperatures that were measured: then nothing but
    these is wrong."""
    logs = known.logs.copy()
    for heat in heats:
        some = known.temperature == heat.requested
        if heat.likely > 0:
            logs[some] = powered(known.logs[some], heat.requested / heat.likely)
        elif known.own[some].any():
            return False
        else:  # greedy: nothing left to be uniform
            logs[some] = np.where(np.arange(logs.shape[1]) == 0, 0.0, -np.inf)
    cut = known.most == ROUNDED  # no temperature brings a token from beyond top_k
    if cut.any() and overall(beyond_bets(known.beyond[cut], known.most[cut], {})) < 1e-3:
        return False
    masks = {"all tokens": np.ones(len(known.own), dtype=bool)}
    return overall(uniform_tests(replace(known, logs=logs), masks, seed)) > 1e-3


def _depends(levels: dict[int, float], alpha: float) -> bool:
    """The fewest at a time show nothing, and more do."""
    fewest, *others = (p for _, p in sorted(levels.items()))
    return fewest > APART and min(others, default=1.0) < alpha


def _why(worst: Test, heats: Sequence[Measured], levels: dict[int, float]) -> str:
    """What the tests say, in words. worst: the smallest p; heats: where the temperatures explain
    everything; levels: where they differ."""
    if heats:
        some = " and ".join(
            f"{h.requested:g}, answers are like those of {h.likely:.2g}" for h in heats
        )
        return f"the temperature is not honoured: asked {some}"
    if levels:
        some = ", ".join(f"{n} at a time p = {p:.2g}" for n, p in sorted(levels.items()))
        return f"answers depend on the batch: {some} ({worst.name})"
    if worst.name == AGAIN:
        return f"answers repeat earlier ones whatever the seed: p = {worst.p:.2g}"
    how = f"{worst.name}, {worst.stratum}, p = {worst.p:.2g}"
    return f"another distribution than the model's: {how}"


def _line(verdict: str, known: Places, heats: Sequence[Measured], why: str, p: float) -> str:
    requested = " and ".join(f"{heat.requested:g}" for heat in heats) or "nothing"
    levels = ", ".join(f"{n:g}" for n in np.unique(known.level)) or "none"
    lead = f"{len(known.most):,} tokens at temperature {requested}, {levels} at a time"
    if verdict == "rejected":
        return f"NOT as asked: {why} ({lead})"
    if verdict == "undecided" and len(known.own) >= FEWEST:
        return f"undecided: {lead}; they leave no choice: a temperature twice as high might pass"
    if verdict == "undecided":
        return f"undecided: {lead}, {len(known.own)} of them judged; {FEWEST} are needed"
    got = " and ".join(f"{h.likely:.2f} ({h.low:.2f} to {h.high:.2f})" for h in heats)
    error = max(heat.error for heat in heats)
    return (
        f"as asked: {lead}; measured temperature {got}, p = {p:.2g}; a temperature off by "
        f"{error:.0%} would be found"
    )
