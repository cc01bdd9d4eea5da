"""Tests of a server's tokens by the likeliest ones of their places (server_places.py),
every one for all tokens and for strata of them.

Bets on alternatives: what may be wrong with a decoder, each as a distribution r that is known
before the token is. Where tokens come from p, the product of r(x) / p(x) reaches 1 / a with
probability a at most, for any number of tokens and for any mean of such products (Ville 1939).
Transforms: the token's place in its distribution is uniform (uniformity.py).
Repeats: two free answers to one prompt part soon.

Shape letters: N tokens, n of them among the likeliest, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.scripts.certificate.server_places import JudgedAnswer, Places, powered
from outrider.scripts.certificate.uniformity import (
    SMALLEST,
    Test,
    independence,
    overall,
    poisson,
    uniformity,
)

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
EQUAL, AGAIN = 8, "tokens in common with an earlier answer"
HOTTEST, COLDEST = 1 / 64, 64.0  # exponents b between which a temperature is looked for


def run_tests(answers: Sequence[JudgedAnswer], known: Places, seed: int) -> list[Test]:
    """Return all tests, the smallest p first."""
    masks = strata(known)
    levels = {f"{n:g} at a time": known.levels == n for n in np.unique(known.levels)}
    found = bets(known, masks) + beyond_bets(known.beyond, known.most, levels)
    found += uniform_tests(known, masks, seed) + repeats(answers, known)
    return sorted(found, key=lambda test: test.p)


def together(found: Sequence[Test]) -> float:
    """Return the p-value of all tests. The alternatives for all tokens have half of the
    false alarms, everything else the other half."""
    named = [t for t in found if t.stratum == "all tokens" and t.name in (*ALTERNATIVES, BEYOND)]
    others = [t for t in found if t not in named]
    return min(1.0, 2 * overall(named), 2 * overall(others))


def strata(known: Places) -> dict[str, np.ndarray]:
    """[n] bool by name; all known before a token is drawn."""
    found = {"all tokens": np.ones(len(known.own), dtype=bool)}
    found["first of an answer"] = known.place == 0
    found |= {f"{n:g} at a time": known.level == n for n in np.unique(known.level)}
    heats = np.unique(known.temperature)
    if len(heats) > 1:
        found |= {f"temperature {heat:g}": known.temperature == heat for heat in heats}
    return found


# --- bets


def alternatives(known: Places) -> dict[str, np.ndarray]:
    """log r(x) / p(x) of every token, [S, n] for S strengths of each of ALTERNATIVES."""
    rows, p = np.arange(len(known.own)), np.exp(known.logs)
    own = p[rows, known.own]
    entropy, before = moments(known.logs)[0], p.cumsum(1) - p

    def within(keep: np.ndarray, *shares: float) -> list[np.ndarray]:
        """p within the tokens to keep [n, K], the best one always among them, at a share of
        the places."""
        kept = p * (keep | (np.arange(p.shape[1]) == 0))
        other = (kept / kept.sum(1, keepdims=True))[rows, known.own] / own
        return [np.log((1 - share) + share * other) for share in shares]

    typical = p > np.minimum(0.09, 0.3 * np.exp(-entropy))[:, None]
    hit, mass = known.stops[rows, known.own], (p * known.stops).sum(1)
    ratios = (
        [powered(known.logs, b)[rows, known.own] - known.log_prob for b in EXPONENTS],
        within(np.zeros_like(p, dtype=bool), 0.05, 0.15, 0.4, 0.98),
        within(typical, 0.3, 0.95),
        [x for cut in (0.95, 0.8, 0.5) for x in within(before < cut, 0.9)],
        [np.log1p(tilt * hit) - np.log1p(tilt * mass) for tilt in (1.0, -0.4, -0.95)],
    )
    return dict(zip(ALTERNATIVES, map(np.stack, ratios), strict=True))


def bets(known: Places, masks: dict[str, np.ndarray]) -> list[Test]:
    """Return every alternative in every stratum: the mean of what its bets have become."""
    found = alternatives(known).items()
    return [_won(name, s, ratios[:, mask]) for name, ratios in found for s, mask in masks.items()]


def beyond_bets(beyond: np.ndarray, most: np.ndarray, masks: dict[str, np.ndarray]) -> list[Test]:
    """Return tokens that are not among the likeliest ([N] bool) too often, in all and in
    strata. Where they hold b at most (`most`, [N]), the bet of a share s on each grows to 1
    - s + s / b by one that is beyond, shrinks to 1 - s else: a mean of 1 at most."""
    shares = np.array(SHARES)[:, None]
    ratios = np.log1p(shares * (beyond / np.maximum(most, 1e-9) - 1))
    every = {"all tokens": np.ones(len(most), dtype=bool), **masks}
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
        "two answers at once": np.stack([known.wave, known.place, known.mate], 1),
    }
    v, out = np.random.default_rng([seed, 20261124]).random((2, len(rows))), list[Test]()
    for i, (order, start) in enumerate(below.items()):
        u = (start + v[i] * p[rows, known.own]).clip(0, 1)
        for stratum, mask in masks.items():
            if mask.sum() >= SMALLEST:
                out += uniformity(u[mask], stratum, order)
        for name, columns in neighbours.items():
            ranked = np.lexsort(columns.T[::-1])
            step = np.diff(columns[ranked], axis=0, prepend=columns[ranked][:1] - 9)
            joined = (step[:, :-1] == 0).all(1) & (step[:, -1] == 1)
            out += independence(u[ranked], joined, name, order)
    return out


# --- repeats


def repeats(answers: Sequence[JudgedAnswer], known: Places) -> list[Test]:
    """Return answers that begin as an earlier one to their prompt does, beside how many
    should: two free ones part soon, those of a cache that is read whatever the seed do not."""
    starts: dict[tuple[Any, ...], dict[tuple[int, ...], float]] = {}
    again, expected, log_prob = 0, 0.0, known.log_prob
    for number, answer in enumerate(answers):
        mine = np.flatnonzero(known.answer == number)[:EQUAL]
        if known.place[mine].tolist() != list(range(EQUAL)):
            continue  # shorter, or a token beyond the likeliest: nothing is known of it
        earlier = starts.setdefault((tuple(answer.prompt), answer.temperature), {})
        again += (start := tuple(answer.tokens[:EQUAL])) in earlier
        expected += sum(earlier.values())
        earlier[start] = math.exp(log_prob[mine].sum())
    return [Test(AGAIN, "answers to one prompt", len(answers), again, poisson(again, expected))]


# --- the temperature
# If x_t ~ p_t, then log p_t(x_t) + H(p_t) has mean 0 and variance V(p_t) given everything before.
# Their sum is the score of the temperature: too likely tokens (a colder distribution, greedy or
# typical acceptance) are those of p^b with b > 1, too unlikely ones have b < 1.


def moments(log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entropy [n] and variance of the log-probability [n], both >= 0, of log-probabilities
    [n, K] that are normalised (-inf allowed)."""
    probs = np.exp(log_probs)
    logs = np.where(probs > 0, log_probs, 0.0)
    entropy = -(probs * logs).sum(1)
    return entropy, (probs * (logs + entropy[:, None]) ** 2).sum(1)


def exponent(log_probs: np.ndarray, own: np.ndarray) -> tuple[float, float]:
    """Return the b for which tokens at index own [n] of log_probs [n, K] are most likely
    draws from p^b, inf where every token is a best one; and how much they tell of it, the
    variance of the score at b = 1."""
    logs, rows = np.where(np.isneginf(log_probs), 0.0, log_probs), np.arange(len(own))
    spread = float(moments(log_probs)[1].sum())
    if not len(own) or (log_probs[rows, own] >= log_probs.max(1)).all():
        return math.inf if len(own) else 1.0, spread
    low, high = HOTTEST, COLDEST
    for _ in range(50):
        b = math.sqrt(low * high)
        mean = (np.exp(powered(log_probs, b)) * logs).sum(1)
        low, high = (b, high) if (logs[rows, own] - mean).sum() > 0 else (low, b)
    return b, spread
