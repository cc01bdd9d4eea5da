"""At which temperature were tokens drawn, given the distributions that they are owed from?

If x_t ~ p_t, then log p_t(x_t) + H(p_t) has mean 0 and variance V(p_t) given everything
before. Their sum is the score of the temperature: tokens of p^b have b = 1 + sum / sum of V
to first order. Too likely tokens (a colder distribution, greedy or typical acceptance) have b
> 1, too unlikely ones (a hotter distribution, another row's, another model's) b < 1.

Shape letters: n tokens, K tokens of a distribution.
"""

from __future__ import annotations

import math

import numpy as np

HOTTEST, COLDEST = 1 / 64, 64.0  # exponents b between which a temperature is looked for


def moments(log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entropy [n] and variance of the log-probability [n], both >= 0, of log-probabilities
    [n, K] that are normalised (-inf allowed)."""
    probs = np.exp(log_probs)
    logs = np.where(probs > 0, log_probs, 0.0)
    entropy = -(probs * logs).sum(1)
    return entropy, (probs * (logs + entropy[:, None]) ** 2).sum(1)


def powered(log_probs: np.ndarray, b: float) -> np.ndarray:
    """p^b, normalised: log-probabilities [n, K] in and out."""
    with np.errstate(invalid="ignore"):
        scaled = np.where(np.isneginf(log_probs), -np.inf, log_probs * b)
    return scaled - np.logaddexp.reduce(scaled, 1, keepdims=True)


def exponent(log_probs: np.ndarray, own: np.ndarray) -> tuple[float, float, float]:
    """The b for which tokens at index own [n] of log_probs [n, K] are most likely draws from
    p^b, with the ends of its 99 % interval; inf where every token is a best one."""
    logs = np.where(np.isneginf(log_probs), 0.0, log_probs)
    rows = np.arange(len(own))
    if not len(own):
        return 1.0, 0.0, math.inf
    if (log_probs[rows, own] >= log_probs.max(1)).all():
        return math.inf, COLDEST if len(own) > 5 else 1.0, math.inf

    def at(b: float) -> tuple[float, float]:
        probs = np.exp(powered(log_probs, b))
        mean = (probs * logs).sum(1)
        return (
            float((logs[rows, own] - mean).sum()),
            float((probs * (logs - mean[:, None]) ** 2).sum()),
        )

    low, high = HOTTEST, COLDEST
    for _ in range(50):
        b = math.sqrt(low * high)
        low, high = (b, high) if at(b)[0] > 0 else (low, b)
    width = 2.576 / math.sqrt(max(at(b)[1], 1e-12))
    return b, max(b - width, 0.0), b + width
