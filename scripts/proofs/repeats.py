"""Answers that follow an earlier one to the same prompt, token by token: a cache that is read
whatever the seed, random numbers that serve twice.

Every token of such an answer may be a draw from its distribution, and a test of single tokens
sees nothing. Two independent answers part soon: both begin with the same L tokens with the
product of their probabilities, next to nothing from eight tokens on.

That is judged by betting, as learned directions are (directions.py). The bet of a share s
says: with probability s an answer takes the first L tokens of an earlier one to its prompt,
any of them, any L. An answer with probabilities p_1, p_2, .. that agrees with an earlier one
of n tokens in its first a is then more likely than a free one by

    1 - s + s * mean over the earlier ones of  (1 / n) * sum over L <= a of 1 / (p_1 ... p_L)

whose mean is 1 where the answer is drawn from its distributions, whatever came before. So the
product over all answers ever reaches 1 / alpha with probability alpha at most (Ville 1939):
exact for any number of answers.

Shape letters: n tokens of an answer, S shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.scripts.proofs.uniformity import Test

SHARES = (0.5, 0.1, 0.02, 0.004)  # of the answers that repeat an earlier one: the bets
LONG = 8  # equal tokens from which on an answer is counted as a repeat, for people


@dataclass
class _Prompt:
    """The answers to one prompt so far. by_first: by their first token; starts: their
    different first LONG tokens, with the probability of each; likely: its sum."""

    count: int = 0
    by_first: dict[int, list[np.ndarray]] = field(default_factory=dict)
    starts: dict[tuple[int, ...], float] = field(default_factory=dict)
    likely: float = 0.0


class Repeats:
    """Answers in the order in which they were asked for. wealth: [S] logarithms of what each
    bet has become; compared: answers that had an earlier one to their prompt; again: those
    that agree with one in LONG tokens or more, expected: how many should."""

    def __init__(self) -> None:
        self.prompts: dict[tuple[int, ...], _Prompt] = {}
        self.wealth = np.zeros(len(SHARES))
        self.compared = self.again = 0
        self.expected = 0.0

    def add(self, prompt: Sequence[int], tokens: Sequence[int], mass: Sequence[float]) -> None:
        """The next answer. mass: [n] probabilities of its tokens, each given those before it."""
        if not len(tokens):
            return
        own = np.asarray(tokens)
        with np.errstate(divide="ignore"):
            less = -np.log(np.asarray(mass, dtype=float)).cumsum()  # of 1 / (p_1 ... p_L)
        known = self.prompts.setdefault(tuple(prompt), _Prompt())
        if known.count:
            self._bet(known, own, less)
        known.count += 1
        known.by_first.setdefault(int(own[0]), []).append(own)
        start = tuple(own[:LONG].tolist())
        if len(start) == LONG and start not in known.starts:
            known.starts[start] = math.exp(-less[LONG - 1])
            known.likely += known.starts[start]

    def _bet(self, known: _Prompt, own: np.ndarray, less: np.ndarray) -> None:
        gains = []
        for other in known.by_first.get(int(own[0]), ()):
            both = min(len(own), len(other))
            apart = np.flatnonzero(own[:both] != other[:both])
            agree = int(apart[0]) if len(apart) else both
            gains.append(np.logaddexp.reduce(less[:agree]) - math.log(len(other)))
        copied = np.logaddexp.reduce(gains) - math.log(known.count) if gains else -math.inf
        shares = np.array(SHARES)
        self.wealth += np.logaddexp(np.log1p(-shares), np.log(shares) + copied)
        self.compared += 1
        self.again += tuple(own[:LONG].tolist()) in known.starts
        self.expected += known.likely

    def tests(self) -> list[Test]:
        """One test, [] where no prompt was answered twice."""
        if not self.compared:
            return []
        total = float(np.logaddexp.reduce(self.wealth)) - math.log(len(SHARES))
        name, stratum = "tokens in common with an earlier answer", "answers to one prompt"
        return [Test(name, stratum, self.compared, total, math.exp(-max(total, 0.0)))]

    def json(self) -> dict[str, Any]:
        """Counts for people."""
        return {
            "compared": self.compared,
            "equal_tokens": LONG,
            "again": self.again,
            "expected": self.expected,
        }
