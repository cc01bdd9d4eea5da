"""Where tokens stand among the likeliest ones of their places, which is what servers tell of a
distribution.

A token among them is, given that it is among them, a draw from their probabilities to the power 1 /
temperature, divided by their sum: whatever is beyond them, and whether the server cut it off or
not. How often a token is beyond them is bounded.

Shape letters: N tokens, n of them among the likeliest, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MARGIN = 0.02  # of top_p, within which rounding may move the edge
EDGE = 0.25  # nats by which a token may fall short of a truncation's edge: rounding
# share of the tokens that may lie beyond a truncation all the same: top_k's, and top_p's, whose
# edge moves with the temperature
ROUNDED, MOVED = 0.003, 0.005
LARGEST = 1 << 18  # tokens of a vocabulary

Ranked = list[tuple[int, float]]  # tokens with their log-probabilities, the likeliest first


@dataclass(frozen=True)
class JudgedAnswer:
    """tokens: the answer. rows: for each of them the likeliest tokens of the model behind the
    text before it, {token: log-probability at temperature 1}. level: answers that were asked
    for together, with the number of their wave. stop: tokens that were to end it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    rows: Sequence[dict[int, float]]
    temperature: float
    top_k: int
    level: int
    wave: int
    top_p: float = 1.0
    stop: tuple[int, ...] = ()

    @property
    def cut(self) -> str:
        """The truncation that was asked for, "" for none."""
        return f"top_k={self.top_k}" if self.top_k else f"top_p={self.top_p:g}" * (self.top_p < 1)


@dataclass(frozen=True)
class Places:
    """Of tokens that are among the likeliest ones of their places [n]: logs: [n, K]
    log-probabilities at the temperature asked for, given that, the likeliest first, -inf where
    there is none; ids: [n, K], -1 there; own: index of the token; answer, place: where it is.

    Of all tokens [N]: whole: the answer; beyond: not among the likeliest; most: how probable that
    was at most. ignored: truncations beyond which an answer's very first token is, asked for by
    itself: there the server cuts nothing off.
    """

    answers: Sequence[JudgedAnswer]
    logs: np.ndarray
    ids: np.ndarray
    own: np.ndarray
    answer: np.ndarray
    place: np.ndarray
    whole: np.ndarray
    beyond: np.ndarray
    most: np.ndarray
    ignored: frozenset[str]

    def of(self, key: str, numbers: np.ndarray | None = None) -> np.ndarray:
        """Return "level", "temperature" or "wave" of the answers of tokens: [n], or by the
        numbers of answers."""
        values = np.array([getattr(answer, key) for answer in self.answers])
        return values[self.answer if numbers is None else numbers]


class _Place(NamedTuple):
    """kept: the tokens that any truncation leaves; at: where the answer's own is there, -1
    beyond. most: how probable it is at most that it is beyond all that a truncation may leave;
    beyond: it is, by more than rounding. ends: the truncation ends among the likeliest."""

    kept: Ranked
    at: int
    most: float
    beyond: bool
    ends: bool


def places(answers: Sequence[JudgedAnswer], best: int) -> Places:
    """Return where every token is. best: how many likeliest tokens every row holds at
    least; a row may hold the text's own token besides."""
    fewest = min((answer.level for answer in answers), default=1)
    read = [[_place(a, i, best) for i in range(len(a.tokens))] for a in answers]
    ignored = frozenset(
        answer.cut
        for answer, line in zip(answers, read, strict=True)
        if answer.level == fewest and line and line[0].ends and line[0].beyond
    )
    every = [(number, i, place) for number, line in enumerate(read) for i, place in enumerate(line)]
    found = [one for one in every if one[2].at >= 0]
    width = max((len(place.kept) for *_, place in found), default=1)
    ids, logs = np.full((len(found), width), -1), np.full((len(found), width), -np.inf)
    for row, (number, _, place) in enumerate(found):
        kept = len(place.kept)
        ids[row, :kept], logs[row, :kept] = zip(*place.kept, strict=True)
        logs[row] /= answers[number].temperature

    def most(number: int, place: _Place) -> float:
        answer = answers[number]
        cut = place.ends and answer.cut not in ignored
        return (ROUNDED if answer.top_k else MOVED) if cut else place.most

    return Places(
        answers,
        powered(logs, 1.0),
        ids,
        own=np.array([place.at for *_, place in found], dtype=int),
        answer=np.array([number for number, *_ in found], dtype=int),
        place=np.array([i for _, i, _ in found], dtype=int),
        whole=np.array([number for number, *_ in every], dtype=int),
        beyond=np.array([place.beyond for *_, place in every], dtype=bool),
        most=np.array([most(number, place) for number, _, place in every], dtype=float),
        ignored=ignored,
    )


def _place(answer: JudgedAnswer, place: int, best: int) -> _Place:
    """Return one token. A nucleus may end a little earlier or later than the numbers say."""
    token, row = answer.tokens[place], answer.rows[place]
    ranked = sorted(row.items(), key=lambda pair: (-pair[1], pair[0]))
    kept = many = ranked[: min(best, answer.top_k or best)]
    if answer.top_p < 1:
        logs = np.array([value for _, value in kept]) / answer.temperature
        mass = np.exp(logs - np.logaddexp.reduce(logs))
        before = mass.cumsum() - mass
        least = 1 - beyond_at_most(kept, answer.temperature)  # what they hold of all tokens
        many = kept[: int((before * least < answer.top_p + MARGIN).sum())]
        kept = kept[: int((before < answer.top_p - MARGIN).sum())]
    at = next((i for i, (other, _) in enumerate(kept) if other == token), -1)
    beyond = row.get(token, -math.inf) < many[-1][1] - (EDGE if answer.cut else 0.0)
    most = beyond_at_most(many, answer.temperature)
    return _Place(kept, at, most, beyond, bool(answer.cut) and len(many) < best)


def beyond_at_most(kept: Ranked, temperature: float) -> float:
    """Return the most that all tokens beyond these may hold at a temperature. With b = 1 /
    temperature and what they hold at 1, r: none is likelier than the last of these, so the
    sum of their p^b is r p_last^(b - 1) at most for b > 1; for b < 1 it is largest where
    all are alike."""
    logs = np.array([value for _, value in kept])
    b, rest = 1 / temperature, max(1 - math.fsum(np.exp(logs)), 1e-6)
    if b >= 1:
        beyond = math.log(rest) + (b - 1) * float(logs[-1])
    else:
        beyond = b * math.log(rest) + (1 - b) * math.log(LARGEST)
    return 1 / (1 + math.exp(float(np.logaddexp.reduce(b * logs)) - beyond))


def powered(log_probs: np.ndarray, b: float) -> np.ndarray:
    """p^b, normalised: log-probabilities [n, K] in and out."""
    with np.errstate(invalid="ignore"):
        scaled = np.where(np.isneginf(log_probs), -np.inf, log_probs * b)
    return scaled - np.logaddexp.reduce(scaled, 1, keepdims=True)
