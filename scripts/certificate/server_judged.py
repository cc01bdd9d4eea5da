"""Tests of a server's tokens by the likeliest ones of their places (server_places.py),
every one for all tokens and for strata of them; and what they come to, in a line.

Bets on alternatives: what may be wrong with a decoder, each as a distribution r that is known
before the token is. Where tokens come from p, the product of r(x) / p(x) reaches 1 / a with
probability a at most, for any number of tokens and for any mean of such products (Ville 1939).
Transforms: the token's place in its distribution is uniform (uniformity.py).

Shape letters: N tokens, n of them among the likeliest, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.scripts.certificate import FEWEST
from outrider.scripts.certificate.server_places import JudgedAnswer, Places, places, powered
from outrider.scripts.certificate.uniformity import Test, independence, overall, uniformity

ALPHA = 1e-3
APART = 1e-2  # p of the fewest answers at a time above which they show nothing
WIDEST = 1.0  # so is nothing where a temperature off by more than this share might pass
TEMPERATURE = "another temperature"
ALTERNATIVES = (
    TEMPERATURE,
    "the best token too often",
    "typical acceptance",
    "a narrower nucleus",
    "stop tokens",
)
BEYOND = "tokens beyond the likeliest"
EXPONENTS = (0.4, 0.6, 0.75, 0.87, 1.15, 1.4, 1.8, 2.5, 6.0)
SHARES = (0.01, 0.05, 0.2, 0.6)  # of the tokens that may be brought from beyond the likeliest
HOTTEST, COLDEST = 1 / 64, 64.0  # exponents b between which a temperature is looked for
ALL = "all tokens"


def judged(
    answers: Sequence[JudgedAnswer], best: int, alpha: float = ALPHA, seed: int = 0
) -> dict[str, Any]:
    """verdict ("passed", "rejected", "undecided"), line, and what they rest on, as JSON."""
    known = places(answers, best)
    found = run_tests(known, seed) if len(known.most) else []
    heats, p = measured(known, found, alpha), together(found)
    levels = {
        int(n): overall([t for t in found if t.stratum == f"{n} at a time"])
        for n in np.unique(known.of("level"))
    }
    rejected = p < alpha
    few = len(known.own) < FEWEST or min((h["error"] for h in heats), default=0) > WIDEST
    verdict = "rejected" if rejected else "undecided" if few else "passed"
    fewest, *others = [*levels.values()] or [1.0]
    differs = rejected and fewest > APART and min(others, default=1.0) < alpha
    return {
        "verdict": verdict,
        "line": _line(verdict, known, found, heats, p, levels if differs else {}),
        "temperature": heats,
        "temperature_honoured": all(heat["p"] >= alpha for heat in heats) if heats else None,
        "depends_on_the_batch": "yes" if differs else "no sign of it" if others else "not tested",
        "p": p,
        "p_by_level": levels,
        "alpha": alpha,
        "tokens": len(known.most),
        "judged": len(known.own),
        "beyond": int(known.beyond.sum()),
        "ignored": sorted(known.ignored),
        "tests": [vars(test) for test in found],
    }


def _line(
    verdict: str,
    known: Places,
    found: Sequence[Test],
    heats: Sequence[dict[str, float]],
    p: float,
    apart: dict[int, float],
) -> str:
    """Return the verdict as text. apart: p by requests at a time, where it depends on these."""
    requested = " and ".join(f"{heat['requested']:g}" for heat in heats) or "nothing"
    levels = ", ".join(f"{n:g}" for n in np.unique(known.of("level"))) or "none"
    lead = f"{len(known.most):,} tokens at temperature {requested}, {levels} at a time"
    likely = " and ".join(f"{heat['likely']:.2f}" for heat in heats)
    if verdict == "rejected":
        worst = found[0]
        batch = "".join(f"; {n} at a time p = {of:.2g}" for n, of in apart.items())
        return (
            f"NOT as asked: {worst.name}, {worst.stratum}, p = {worst.p:.2g}{batch}; answers are "
            f"likest those of temperature {likely} ({lead})"
        )
    if verdict == "undecided" and len(known.own) >= FEWEST:
        return f"undecided: {lead}; they leave no choice: a temperature twice as high might pass"
    if verdict == "undecided":
        return f"undecided: {lead}, {len(known.own)} of them judged; {FEWEST} are needed"
    error = max(heat["error"] for heat in heats)
    return (
        f"as asked: {lead}; measured temperature {likely}, p = {p:.2g}; a temperature off by "
        f"{error:.0%} would be found"
    )


# --- all tests


def run_tests(known: Places, seed: int) -> list[Test]:
    """Return all tests, the smallest p first."""
    masks, all_levels = strata(known), known.of("level", known.whole)
    levels = {f"{n:g} at a time": all_levels == n for n in np.unique(all_levels)}
    found = bets(known, masks) + beyond_bets(known.beyond, known.most, levels)
    return sorted([*found, *uniform_tests(known, masks, seed)], key=lambda test: test.p)


def together(found: Sequence[Test]) -> float:
    """Return the p-value of all tests. The alternatives for all tokens have half of the
    false alarms, everything else the other half."""
    named = [t for t in found if t.stratum == ALL and t.name in (*ALTERNATIVES, BEYOND)]
    others = [t for t in found if t not in named]
    return min(1.0, 2 * overall(named), 2 * overall(others))


def strata(known: Places) -> dict[str, np.ndarray]:
    """[n] bool by name; all known before a token is drawn."""
    level, heat = known.of("level"), known.of("temperature")
    found = {ALL: np.ones(len(known.own), dtype=bool), "first of an answer": known.place == 0}
    found |= {f"{n:g} at a time": level == n for n in np.unique(level)}
    if len(heats := np.unique(heat)) > 1:
        found |= {f"temperature {one:g}": heat == one for one in heats}
    return found


# --- bets


def alternatives(known: Places) -> dict[str, np.ndarray]:
    """log r(x) / p(x) of every token, [S, n] for S strengths of each of ALTERNATIVES."""
    rows, p = np.arange(len(known.own)), np.exp(known.logs)
    own, before = p[rows, known.own], p.cumsum(1) - p

    def within(keep: np.ndarray, *shares: float) -> list[np.ndarray]:
        """p within the tokens to keep [n, K], the best one always among them, at a share of
        the places."""
        kept = p * (keep | (np.arange(p.shape[1]) == 0))
        other = (kept / kept.sum(1, keepdims=True))[rows, known.own] / own
        return [np.log((1 - share) + share * other) for share in shares]

    entropy = -(p * np.where(p > 0, known.logs, 0.0)).sum(1)
    typical = p > np.minimum(0.09, 0.3 * np.exp(-entropy))[:, None]
    ends = [known.answers[number].stop for number in known.answer]
    stops = np.stack([np.isin(ids, stop) for ids, stop in zip(known.ids, ends, strict=True)])
    hit, mass = stops[rows, known.own], (p * stops).sum(1)
    now = known.logs[rows, known.own]
    ratios = (
        [powered(known.logs, b)[rows, known.own] - now for b in EXPONENTS],
        within(np.zeros_like(p, dtype=bool), 0.05, 0.15, 0.4, 0.98),
        within(typical, 0.3, 0.95),
        [x for cut in (0.95, 0.8, 0.5) for x in within(before < cut, 0.9)],
        [np.log1p(tilt * hit) - np.log1p(tilt * mass) for tilt in (1.0, -0.4, -0.95)],
    )
    return dict(zip(ALTERNATIVES, map(np.stack, ratios), strict=True))


def bets(known: Places, masks: dict[str, np.ndarray]) -> list[Test]:
    """Return every alternative in every stratum: the mean of what its bets have become."""
    found = alternatives(known).items() if len(known.own) else ()
    return [_won(name, s, ratios[:, mask]) for name, ratios in found for s, mask in masks.items()]


def beyond_bets(beyond: np.ndarray, most: np.ndarray, masks: dict[str, np.ndarray]) -> list[Test]:
    """Return tokens that are not among the likeliest ([N] bool) too often, in all and in
    strata. Where they hold b at most (`most`, [N]), the bet of a share s on each grows to 1
    - s + s / b by one that is beyond, shrinks to 1 - s else: a mean of 1 at most."""
    shares = np.array(SHARES)[:, None]
    ratios = np.log1p(shares * (beyond / np.maximum(most, 1e-9) - 1))
    every = {ALL: np.ones(len(most), dtype=bool), **masks}
    return [_won(BEYOND, stratum, ratios[:, mask]) for stratum, mask in every.items()]


def _won(name: str, stratum: str, ratios: np.ndarray) -> Test:
    """Return the mean of what bets have become, by the logarithms of what each token did to
    each."""
    total = float(np.logaddexp.reduce(ratios.sum(1))) - math.log(len(ratios))
    return Test(name, stratum, ratios.shape[1], total, math.exp(-min(max(total, 0.0), 700)))


# --- transforms


def uniform_tests(known: Places, masks: dict[str, np.ndarray], seed: int) -> list[Test]:
    """Return the tests of single tokens in every stratum, of neighbours in an answer, of
    answers at once."""
    rows, p = np.arange(len(known.own)), np.exp(known.logs)
    token = known.ids[rows, known.own]
    below = {
        "by probability": (p.cumsum(1) - p)[rows, known.own],
        "by id": (p * (known.ids < token[:, None])).sum(1),
    }
    neighbours = {
        "two tokens of an answer": np.stack([known.answer, known.place], 1),
        "two answers at once": np.stack([known.of("wave"), known.place, known.answer], 1),
    }
    v, found = np.random.default_rng([seed, 20261124]).random((2, len(rows))), list[Test]()
    for i, (order, start) in enumerate(below.items()):
        u = (start + v[i] * p[rows, known.own]).clip(0, 1)
        for stratum, mask in masks.items():
            found += uniformity(u[mask], stratum, order)
        for name, columns in neighbours.items():
            ranked = np.lexsort(columns.T[::-1])
            step = np.diff(columns[ranked], axis=0, prepend=columns[ranked][:1] - 9)
            joined = (step[:, :-1] == 0).all(1) & (step[:, -1] == 1)
            found += independence(u[ranked], joined, name, order)
    return found


# --- the temperature
# If x_t ~ p_t, then log p_t(x_t) + H(p_t) has mean 0 and variance V(p_t) given everything before.
# Their sum is the score of the temperature: too likely tokens (a colder distribution, greedy or
# typical acceptance) are those of p^b with b > 1, too unlikely ones have b < 1.


def measured(known: Places, found: Sequence[Test], alpha: float) -> list[dict[str, float]]:
    """Return every temperature that was requested, and the likely one. error: share by which it
    could be off and surely be found. p: of this temperature's own tests."""
    out, every = list[dict[str, float]](), known.of("temperature")
    heats = list(dict.fromkeys(every.tolist()))  # as they were asked for
    needed = math.sqrt(2 * math.log(9 * max(len(found), 1) / alpha)) + 2.33
    for heat in heats:
        b, spread = exponent(known.logs[every == heat], known.own[every == heat])
        error = needed / math.sqrt(spread) if spread > 0 else math.inf
        stratum = f"temperature {heat:g}" if len(heats) > 1 else ALL
        some = [t.p for t in found if t.stratum == stratum and t.name == TEMPERATURE]
        p = min(1.0, len(found) * min(some, default=1.0))
        out.append({"requested": heat, "likely": heat / b, "error": error, "p": p})
    return out


def exponent(log_probs: np.ndarray, own: np.ndarray) -> tuple[float, float]:
    """Return the b for which tokens at index own [n] of log_probs [n, K] (normalised, -inf
    allowed) are most likely draws from p^b, inf where every token is a best one; and how much
    they tell of it, the variance of the score at b = 1."""
    logs, rows = np.where(np.isneginf(log_probs), 0.0, log_probs), np.arange(len(own))

    def mean(b: float) -> np.ndarray:
        return (np.exp(powered(log_probs, b)) * logs).sum(1)

    spread = float((np.exp(log_probs) * (logs - mean(1.0)[:, None]) ** 2).sum())
    if not len(own) or (log_probs[rows, own] >= log_probs.max(1)).all():
        return math.inf if len(own) else 1.0, spread
    low, high = HOTTEST, COLDEST
    for _ in range(50):
        b = math.sqrt(low * high)
        low, high = (b, high) if (logs[rows, own] - mean(b)).sum() > 0 else (low, b)
    return b, spread
