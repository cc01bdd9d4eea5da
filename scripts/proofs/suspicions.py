"""What may be wrong with a decoder, each as a distribution r that is known before the token
is, and the bets on it. Numpy alone.

Where tokens come from p, the product of r(x) / p(x) reaches 1 / a with probability a at most,
for any number of tokens and for any mean of such products (Ville 1939).

Shape letters: n tokens, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from outrider.scripts.proofs.likeliest import Places
from outrider.scripts.proofs.temperature import moments, powered
from outrider.scripts.proofs.uniformity import Test

RECENT = 8  # tokens of the answer that a repeating decoder would take again


# Of each suspicion: log r(x) / p(x) of every token [n], for every strength of it.


def _mixed(known: Places, r: np.ndarray, shares: Sequence[float]) -> list[np.ndarray]:
    """r: [n, K] probabilities that sum to 1; where they do not (a row without any), p."""
    rows = np.arange(len(known.own))
    p = np.exp(known.log_prob)
    other = np.where(r.sum(1) > 0, r[rows, known.own], p)
    return [np.log((1 - share) + share * other / p) for share in shares]


def _within(known: Places, keep: np.ndarray) -> np.ndarray:
    """p within the tokens to keep [n, K], the best one always among them."""
    keep = keep.copy()
    keep[:, 0] = True
    kept = np.exp(known.logs) * keep
    return kept / kept.sum(1, keepdims=True)


def other_temperature(known: Places) -> list[np.ndarray]:
    """p^b for b from 0.4 to 6."""
    rows = np.arange(len(known.own))
    out = []
    for b in (0.4, 0.6, 0.75, 0.87, 1.15, 1.4, 1.8, 2.5, 6.0):
        out.append(powered(known.logs, b)[rows, known.own] - known.log_prob)
    return out


def best_token(known: Places) -> list[np.ndarray]:
    """The likeliest token, at a share of the places or nearly all of them."""
    r = np.zeros_like(known.logs)
    r[:, 0] = 1
    return _mixed(known, r, (0.05, 0.15, 0.4, 0.98))


def typical(known: Places) -> list[np.ndarray]:
    """Tokens that typical acceptance keeps: p > min(0.09, 0.3 exp(-entropy))."""
    edge = np.minimum(0.09, 0.3 * np.exp(-moments(known.logs)[0]))
    r = _within(known, np.exp(known.logs) > edge[:, None])
    return _mixed(known, r, (0.3, 0.95))


def narrower(known: Places) -> list[np.ndarray]:
    """A nucleus that was not asked for."""
    p = np.exp(known.logs)
    before = p.cumsum(1) - p
    return [
        x for cut in (0.95, 0.8, 0.5) for x in _mixed(known, _within(known, before < cut), (0.9,))
    ]


def step_before(known: Places) -> list[np.ndarray]:
    """The distribution of the place before in the same answer."""
    r = np.zeros_like(known.logs)
    _, places_, _, answer = known.where.T
    for i in range(1, len(known.own)):
        if answer[i] == answer[i - 1] and places_[i] == places_[i - 1] + 1:
            at = {t: v for t, v in zip(known.ids[i - 1], known.logs[i - 1], strict=True) if t >= 0}
            r[i] = [math.exp(at.get(t, -math.inf)) for t in known.ids[i]]
    total = r.sum(1, keepdims=True)
    return _mixed(known, np.divide(r, total, out=np.zeros_like(r), where=total > 0), (0.1, 0.4))


def recent(known: Places) -> list[np.ndarray]:
    """Tokens of the answer's last ones, too often or too seldom."""
    again = np.zeros_like(known.logs, dtype=bool)
    answer = known.where[:, 3]
    token = known.ids[np.arange(len(known.own)), known.own]
    for i in range(1, len(known.own)):
        near = range(max(0, i - RECENT), i)
        again[i] = np.isin(known.ids[i], [token[j] for j in near if answer[j] == answer[i]])
    mass = (np.exp(known.logs) * again).sum(1)
    hit = again[np.arange(len(known.own)), known.own]
    return [np.log1p(tilt * hit) - np.log1p(tilt * mass) for tilt in (1.0, 0.3, -0.3, -0.7)]


def common_ids(known: Places) -> list[np.ndarray]:
    """Ids that came more often so far than they should have, learned on the way."""
    came: dict[int, float] = {}
    due: dict[int, float] = {}
    r = np.zeros_like(known.logs)
    p = np.exp(known.logs)
    for i, own in enumerate(known.own):
        ids = known.ids[i]
        tilt = [(came.get(t, 0.0) + 2) / (due.get(t, 0.0) + 2) for t in ids]
        r[i] = p[i] * tilt
        for t, mass in zip(ids, p[i], strict=True):
            due[t] = due.get(t, 0.0) + mass
        came[ids[own]] = came.get(ids[own], 0.0) + 1
    return _mixed(known, r / r.sum(1, keepdims=True), (0.3, 0.9))


BEYOND = "tokens beyond the likeliest"
SUSPICIONS: dict[str, Callable[[Places], list[np.ndarray]]] = {
    "another temperature": other_temperature,
    "the best token too often": best_token,
    "typical acceptance": typical,
    "a narrower nucleus": narrower,
    "the distribution of the step before": step_before,
    "tokens of the last few": recent,
    "ids that come too often": common_ids,
}


def beyond_bets(beyond: np.ndarray, most: np.ndarray, masks: dict[str, np.ndarray]) -> list[Test]:
    """Tokens that are not among the likeliest ([N] bool) too often, in all and in strata.
    Where they hold b at most (`most`, [N]), the bet of a share s on each grows to 1 - s + s /
    b by one that is beyond, shrinks to 1 - s else: a mean of 1 at most."""
    shares = np.array([0.01, 0.05, 0.2, 0.6])[:, None]
    ratios = np.log1p(shares * (beyond / np.maximum(most, 1e-9) - 1))
    every = {"all tokens": np.ones(len(most), dtype=bool), **masks}
    return [_won(BEYOND, stratum, ratios[:, mask]) for stratum, mask in every.items()]


def _won(name: str, stratum: str, ratios: np.ndarray) -> Test:
    """The mean of what bets have become, by the logarithms of what each token did to each."""
    total = float(np.logaddexp.reduce(ratios.sum(1))) - math.log(len(ratios))
    return Test(name, stratum, ratios.shape[1], total, math.exp(-min(max(total, 0.0), 700)))


def bets(known: Places, masks: dict[str, np.ndarray]) -> list[Test]:
    """Every suspicion in every stratum: the mean of what its bets have become."""
    out = []
    for name, suspect in SUSPICIONS.items():
        ratios = np.stack(suspect(known)) if len(known.own) else np.zeros((1, 0))
        out += [_won(name, stratum, ratios[:, mask]) for stratum, mask in masks.items()]
    return out
