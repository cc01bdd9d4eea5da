"""Tests that numbers are independent and uniform, as the transforms of a sound decoder's
tokens are (transforms.py); and what so many tokens are sure to see.

A biased decoder moves mass along an order of the tokens: towards the likelier ones, the
rarer ones, the lower ids. Where it moves a mass d past one point of the order, the total
variation is d, and the transforms up to that point are as many as a binomial variable of
probability x + d says, where x is right. The Kolmogorov-Smirnov test rejects as soon as
their share is further from x than sqrt(ln(2 / alpha) / 2n), the first term of its
p-value, and the share's standard deviation is 1 / sqrt(4n) at most: so d is seen with
probability SURE from n = (`_reach` / d)^2 on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SMALLEST = 200  # strata below are not tested
SURE = 0.95  # the probability with which a shift is seen
DEVIATIONS = 1.645  # its quantile of the normal distribution


@dataclass(frozen=True)
class Test:
    """One test of one stratum. p: probability of a value as extreme when every U is
    uniform."""

    name: str
    stratum: str
    n: int
    statistic: float
    p: float


def kolmogorov(u: np.ndarray) -> tuple[float, float]:
    """D and p of the Kolmogorov-Smirnov test of uniformity (Stephens' finite-n argument)."""
    n = len(u)
    x = np.sort(u)
    steps = np.arange(1, n + 1) / n
    d = float(max((steps - x).max(), (x - steps + 1 / n).max()))
    at = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    if at < 0.3:
        return d, 1.0
    k = np.arange(1, 101)
    return d, float(np.clip(2 * ((-1.0) ** (k - 1) * np.exp(-2 * (k * at) ** 2)).sum(), 0, 1))


def uniformity(u: np.ndarray, stratum: str, order: str) -> list[Test]:
    """Test one stratum, where it is large enough. order: how the tokens were ordered."""
    name = f"Kolmogorov-Smirnov, {order}"
    return [Test(name, stratum, len(u), *kolmogorov(u))] if len(u) >= SMALLEST else []


def independence(u: np.ndarray, joined: np.ndarray, stratum: str, order: str) -> list[Test]:
    """Correlate tokens t - 1 and t where joined[t]: each may be right by itself.

    joined[t] may depend on token t - 1 (a cycle goes on because that was accepted), whose
    transform is then not uniform here: it is taken as it came, and the second is asked
    whether it is uniform given it.
    """
    at = np.flatnonzero(joined[1:]) + 1
    if len(at) < SMALLEST:
        return []
    a, b = u[at - 1] - 0.5, u[at] - 0.5
    z = float((a * b).sum() / math.sqrt((a**2).sum() / 12))
    return [Test(f"correlation, {order}", stratum, len(at), z, math.erfc(abs(z) / math.sqrt(2)))]


def overall(tests: Sequence[Test]) -> float:
    """Return the p-value of all tests together (Bonferroni: they may depend on one
    another); 1 of none."""
    return min(1.0, max(len(tests), 1) * min((t.p for t in tests), default=1.0))


# --- the detection bound


def _reach(alpha: float, tests: int) -> float:
    """Return a shift times the root of the tokens that show it. tests: among how many alpha
    is divided."""
    return math.sqrt(math.log(2 * tests / alpha) / 2) + DEVIATIONS / 2


def detectable(n: int, alpha: float, tests: int) -> float | None:
    """Return the total variation from which on n tokens show a shift with probability SURE;
    None where they show none."""
    shift = _reach(alpha, tests) / math.sqrt(max(n, 1))
    return shift if shift < 1 else None


def tokens_for(shift: float, alpha: float, tests: int) -> int:
    """Return the fewest tokens that show a shift with probability SURE."""
    return math.ceil((_reach(alpha, tests) / shift) ** 2)
