"""What may be wrong with a decoder, each as a distribution r that is known before the token
is, and the bets on it.

Where tokens come from p, the product of r(x) / p(x) reaches 1 / a with probability a at most,
for any number of tokens and for any mean of such products (Ville 1939).

Shape letters: n tokens, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from outrider.scripts.certificate.likeliest import Places
from outrider.scripts.certificate.temperature import moments, powered
from outrider.scripts.certificate.uniformity import Test

# Of each suspicion: log r(x) / p(x) of every token [n], for every strength of it.


def _mixed(known: Places, r: np.ndarray, shares: Sequence[float]) -> list[np.ndarray]:
    """r: [n, K] probabilities that sum to 1."""
    other = r[np.arange(len(known.own)), known.own] / np.exp(known.log_prob)
    return [np.log((1 - share) + share * other) for share in shares]


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


def stop_tokens(known: Places) -> list[np.ndarray]:
    """Tokens that were to end the answer, too often or too seldom."""
    mass = (np.exp(known.logs) * known.stops).sum(1)
    hit = known.stops[np.arange(len(known.own)), known.own]
    return [np.log1p(tilt * hit) - np.log1p(tilt * mass) for tilt in (1.0, -0.4, -0.95)]


BEYOND = "tokens beyond the likeliest"
SUSPICIONS: dict[str, Callable[[Places], list[np.ndarray]]] = {
    "another temperature": other_temperature,
    "the best token too often": best_token,
    "typical acceptance": typical,
    "a narrower nucleus": narrower,
    "stop tokens": stop_tokens,
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
