"""A quick judgement of a server's answers, from what servers tell: the ids of the tokens, and
for every place the likeliest tokens of the model there with their log-probabilities
(likeliest.py).

Two kinds of tests, every one for all tokens and for strata of them. Transforms: the token's
place in its distribution is uniform (uniformity.py). Bets on what is suspected
(suspicions.py).

Shape letters: n tokens, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.scripts.certificate.alternatives import BEYOND, SUSPICIONS, bets, beyond_bets
from outrider.scripts.certificate.likeliest import ROUNDED, JudgedAnswer, Places, places
from outrider.scripts.certificate.temperature import exponent, moments, powered
from outrider.scripts.certificate.uniformity import (
    SMALLEST,
    Test,
    independence,
    overall,
    poisson,
    uniformity,
)

ALPHA = 1e-3
FEWEST = 400  # judged tokens below which nothing is decided in favour of a server
EQUAL, AGAIN = 8, "tokens in common with an earlier answer"
APART = 1e-2  # p of the fewest answers at a time above which they show nothing
WIDEST = 1.0  # so is nothing where a temperature off by more than this share might pass


def strata(known: Places) -> dict[str, np.ndarray]:
    """[n] bool by name; all known before a token is drawn."""
    found = {"all tokens": np.ones(len(known.own), dtype=bool)}
    found["first of an answer"] = known.where[:, 1] == 0
    for level in np.unique(known.level):
        found[f"{level:g} at a time"] = known.level == level
    if len(np.unique(known.temperature)) > 1:
        for heat in np.unique(known.temperature):
            found[f"temperature {heat:g}"] = known.temperature == heat
    return found


# --- transforms


def transforms(known: Places, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """[n] uniform numbers of every token, ordered by probability and by id."""
    p = np.exp(known.logs)
    rows = np.arange(len(known.own))
    mine = p[rows, known.own]
    by_rank = (p.cumsum(1) - p)[rows, known.own]
    token = known.ids[rows, known.own]
    by_id = (p * (known.ids < token[:, None])).sum(1)
    v = rng.random((2, len(rows)))
    made = {"by probability": by_rank + v[0] * mine, "by id": by_id + v[1] * mine}
    return {name: u.clip(0, 1) for name, u in made.items()}


def uniform_tests(known: Places, masks: dict[str, np.ndarray], seed: int) -> list[Test]:
    """Of single tokens in every stratum, of neighbours in an answer, of answers at once."""
    out = []
    wave, place, mate, answer = known.where.T
    made = transforms(known, np.random.default_rng([seed, 20261124]))
    for order, u in made.items():
        for stratum, mask in masks.items():
            if mask.sum() >= SMALLEST:
                out += uniformity(u[mask], stratum, order)
        for columns, name in (
            ((answer, place), "two tokens of an answer"),
            ((wave, place, mate), "two answers at once"),
        ):
            ranked = np.lexsort(columns[::-1])
            sorted_ = np.stack(columns, 1)[ranked]
            step = np.diff(sorted_, axis=0, prepend=sorted_[:1] - 9)
            joined = (step[:, :-1] == 0).all(1) & (step[:, -1] == 1)
            out += independence(u[ranked], joined, name, order)
    return out


def repeats(answers: Sequence[JudgedAnswer], best: int) -> list[Test]:
    """Answers that begin as an earlier one to their prompt does, beside how many should: two free
    ones part soon, those of a cache that is read whatever the seed do not."""
    starts: dict[tuple[Any, ...], dict[tuple[int, ...], float]] = {}
    again, expected = 0, 0.0
    for answer in answers:
        known = places([answer], best)
        if known.where[:EQUAL, 1].tolist() != list(range(EQUAL)):
            continue  # shorter, or a token beyond the likeliest: nothing is known of it
        earlier = starts.setdefault((tuple(answer.prompt), answer.temperature), {})
        again += (start := tuple(answer.tokens[:EQUAL])) in earlier
        expected += sum(earlier.values())
        earlier[start] = math.exp(known.log_prob[:EQUAL].sum())
    return [Test(AGAIN, "answers to one prompt", len(answers), again, poisson(again, expected))]


def _levels(known: Places) -> dict[str, np.ndarray]:
    """[N] bool of every number of requests at a time."""
    return {f"{n:g} at a time": known.levels == n for n in np.unique(known.levels)}


def tests(answers: Sequence[JudgedAnswer], known: Places, best: int, seed: int) -> list[Test]:
    """All of them, the smallest p first."""
    masks = strata(known)
    out = (
        bets(known, masks)
        + beyond_bets(known.beyond, known.most, _levels(known))
        + uniform_tests(known, masks, seed)
    )
    return sorted(out + repeats(answers, best), key=lambda test: test.p)


def together(found: Sequence[Test]) -> float:
    """The p-value of all tests. What is suspected of all tokens has half of the false alarms,
    everything else the other half."""
    named = [t for t in found if t.stratum == "all tokens" and t.name in (*SUSPICIONS, BEYOND)]
    others = [t for t in found if t not in named]
    return min(1.0, 2 * overall(named), 2 * overall(others))


# --- what it comes to


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


def measured(known: Places, found: Sequence[Test], alpha: float) -> list[Measured]:
    """Every temperature that was asked for."""
    out = []
    heats = list(dict.fromkeys(known.temperature.tolist()))  # as they were asked for
    for heat in heats:
        own = known.only(known.temperature == heat)
        b, low, high = exponent(own.logs, own.own)
        spread = float(moments(own.logs)[1].sum())
        needed = math.sqrt(2 * math.log(9 * max(len(found), 1) / alpha)) + 2.33
        error = needed / math.sqrt(spread) if spread > 0 else math.inf
        stratum = f"temperature {heat:g}" if len(heats) > 1 else "all tokens"
        some = [t.p for t in found if t.stratum == stratum and t.name == "another temperature"]
        p = min(1.0, len(found) * min(some, default=1.0))
        ends = [heat / x if x > 0 else math.inf for x in (high, low)]
        out.append(Measured(float(heat), heat / b, ends[0], ends[1], error, p))
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
    fitted = replace(known, logs=logs)
    masks = {"all tokens": np.ones(len(known.own), dtype=bool)}
    return overall(uniform_tests(fitted, masks, seed)) > 1e-3


def _by_level(known: Places, found: Sequence[Test]) -> dict[int, float]:
    """p of the tests of every number of requests at a time, all together."""
    levels = [int(x) for x in np.unique(known.level)]
    own = {n: [t for t in found if t.stratum == f"{n} at a time"] for n in levels}
    return {n: overall(some) for n, some in own.items()}


def judged(
    answers: Sequence[JudgedAnswer], best: int, alpha: float = ALPHA, seed: int = 0
) -> dict[str, Any]:
    """verdict ("passed", "rejected", "undecided"), line, and what they rest on, as JSON."""
    known = places(answers, best)
    found = tests(answers, known, best, seed) if len(known.most) else []
    heats = measured(known, found, alpha)
    p, levels = together(found), _by_level(known, found)
    rejected = p < alpha
    cold = rejected and any(heat.p < alpha for heat in heats) and _explained(known, heats, seed)
    differs = rejected and not cold and _depends(levels, alpha)
    why = ""
    if rejected:
        why = _why(found[0], heats if cold else [], levels if differs else {})
    few = len(known.own) < FEWEST or not min((h.error for h in heats), default=0) <= WIDEST
    verdict = "rejected" if rejected else "undecided" if few else "passed"
    many = max(levels, default=1)
    batch = "not tested" if len(levels) < 2 else "no sign of it"
    if differs:
        batch = "yes"
    return {
        "verdict": verdict,
        "line": _line(verdict, known, heats, levels, why, p),
        "temperature": [vars(heat) for heat in heats],
        "temperature_honoured": all(heat.p >= alpha for heat in heats) if heats else None,
        "distribution_is_the_models": None if few and not rejected else not rejected,
        "depends_on_the_batch": batch,
        "most_at_a_time": many,
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


def _depends(levels: dict[int, float], alpha: float) -> bool:
    """The fewest at a time show nothing, and more do."""
    fewest = min(levels, default=0)
    others = [p for level, p in levels.items() if level != fewest]
    return bool(others) and levels[fewest] > APART and min(others) < alpha


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


def _line(
    verdict: str,
    known: Places,
    heats: Sequence[Measured],
    levels: dict[int, float],
    why: str,
    p: float,
) -> str:
    requested = " and ".join(f"{heat.requested:g}" for heat in heats) or "nothing"
    some = ", ".join(map(str, sorted(levels)))
    lead = f"{len(known.most):,} tokens at temperature {requested}, {some or 'none'} at a time"
    if verdict == "rejected":
        return f"NOT as asked: {why} ({lead})"
    got = " and ".join(f"{h.likely:.2f} ({h.low:.2f} to {h.high:.2f})" for h in heats)
    error = max((heat.error for heat in heats), default=math.inf)
    if verdict == "undecided" and len(known.own) >= FEWEST:
        return f"undecided: {lead}; they leave no choice: a temperature twice as high might pass"
    if verdict == "undecided":
        return f"undecided: {lead}, {len(known.own)} of them judged; {FEWEST} are needed"
    return (
        f"as asked: {lead}; measured temperature {got}, p = {p:.2g}; a temperature off by "
        f"{error:.0%} would be found"
    )
