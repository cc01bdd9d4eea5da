"""What a sample of n tokens is sure to see. Numpy alone.

A decoder that leans moves mass along an order of the tokens: towards the likelier ones, the rarer
ones, the lower ids. Where it moves a mass d past one point of the order, the total variation is d,
and the transforms (pit.py) up to that point are as many as a binomial variable of probability x + d
says, where x is right. The Kolmogorov-Smirnov test rejects as soon as their share lies further from
x than its critical distance, so the binomial distribution says how often it does.
"""

from __future__ import annotations

import math

import numpy as np

SURE = 0.95  # the probability with which a shift is seen
POINTS = np.linspace(0, 1, 41)  # of an order, at which a shift is tried: the worst one counts
MOST = 1_000_000  # tokens beyond which no sample goes


def critical(n: int, alpha: float) -> float:
    """The distance from which on the Kolmogorov-Smirnov test of n numbers rejects at `alpha`: by
    its first term, which is never below its p-value."""
    return math.sqrt(math.log(2 / alpha) / 2) / (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))


def seen(n: int, shift: float, alpha: float, tests: int) -> float:
    """The probability with which n tokens show a shift of this total variation, at least; tests:
    among how many alpha is divided."""
    limit = critical(n, alpha / tests)
    factorials = np.r_[0.0, np.log(np.arange(1, n + 1)).cumsum()]
    ways = factorials[-1] - factorials - factorials[::-1]
    k, found = np.arange(n + 1), 1.0
    for x in POINTS[POINTS + shift < 1]:
        chance = np.exp(ways + k * math.log(x + shift) + (n - k) * math.log1p(-x - shift))
        found = min(found, float(chance[k > n * (x + limit)].sum()))
    return found


def detectable(n: int, alpha: float, tests: int) -> float | None:
    """The total variation from which on n tokens show a shift with probability SURE; None where
    they show none."""
    low, high = 0.0, 0.97
    if n < 1 or seen(n, high, alpha, tests) < SURE:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if seen(n, middle, alpha, tests) >= SURE else (middle, high)
    return high


def tokens_for(shift: float, alpha: float, tests: int) -> int:
    """The fewest tokens, up to a hundredth, that show a shift with probability SURE."""
    low, high = 1, 1
    while high < MOST and seen(high, shift, alpha, tests) < SURE:
        low, high = high, 2 * high
    while high - low > high // 100 + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(middle, shift, alpha, tests) >= SURE else (middle, high)
    return high


def said(n: int, shift: float | None) -> str:
    """The bound in a line."""
    if shift is None:
        return f"with {n:,} tokens no shift is sure to be seen"
    return (
        f"with {n:,} tokens a shift of total variation {shift:.3f} or more, towards likelier or "
        f"rarer tokens or along the ids, is seen with probability {SURE:g}"
    )
