"""Where tokens stand among the likeliest ones of their places, which is what servers tell of a
distribution.

A token among them is, given that it is among them, a draw from their probabilities to the power 1 /
temperature, divided by their sum: whatever lies beyond them, and whether the server cut it off or
not. How often a token lies beyond them is bounded.

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
    there is none; ids: [n, K], -1 there; stops: [n, K] bool, those that end the answer; own: index
    of the token; wave, mate: of its answer, and its number there; answer, place: where it stands;
    level, temperature: how it was asked for.

    Of all tokens [N]: beyond: not among the likeliest; most: how probable that was at most; levels.
    ignored: truncations beyond which an answer's very first token lies, asked for by itself: there
    the server cuts nothing off.
    """

    logs: np.ndarray
    ids: np.ndarray
    stops: np.ndarray
    own: np.ndarray
    wave: np.ndarray
    mate: np.ndarray
    answer: np.ndarray
    place: np.ndarray
    level: np.ndarray
    temperature: np.ndarray
    beyond: np.ndarray
    most: np.ndarray
    levels: np.ndarray
    ignored: frozenset[str]

    @property
    def log_prob(self) -> np.ndarray:
        """[n] of the tokens themselves."""
        return self.logs[np.arange(len(self.own)), self.own]


class _Place(NamedTuple):
    """kept: the tokens that any truncation leaves; at: where the answer's own stands there, -1
    beyond. most: how probable it is at most that it is beyond all that a truncation may leave;
    beyond: it is, by more than rounding. ends: the truncation ends among the likeliest."""

    kept: Ranked
    at: int
    most: float
    beyond: bool
    ends: bool


def places(answers: Sequence[JudgedAnswer], best: int) -> Places:
    """Return where every token stands. best: how many likeliest tokens every row holds at
    least; a row may hold the text's own token besides."""
    fewest = min((answer.level for answer in answers), default=1)
    read = [[_place(a, i, best) for i in range(len(a.tokens))] for a in answers]
    ignored = frozenset(
        answer.cut
        for answer, line in zip(answers, read, strict=True)
        if answer.level == fewest and line and line[0].ends and line[0].beyond
    )
    found: list[tuple[Ranked, tuple[int, ...]]] = []
    of_kept: list[tuple[float, ...]] = []
    of_all: list[tuple[float, ...]] = []
    mates: dict[int, int] = {}
    for number, (a, line) in enumerate(zip(answers, read, strict=True)):
        mate = mates[a.wave] = mates.get(a.wave, -1) + 1
        for i, place in enumerate(line):
            cut = place.ends and a.cut not in ignored
            rounded = ROUNDED if a.top_k else MOVED
            of_all.append((place.beyond, rounded if cut else place.most, a.level))
            if place.at >= 0:
                found.append((place.kept, a.stop))
                of_kept.append((place.at, a.wave, mate, number, i, a.level, a.temperature))
    width = max((len(kept) for kept, _ in found), default=1)
    ids, logs = np.full((len(found), width), -1), np.full((len(found), width), -np.inf)
    stops = np.zeros((len(found), width), dtype=bool)
    for i, (kept, stop) in enumerate(found):
        ids[i, : len(kept)], logs[i, : len(kept)] = zip(*kept, strict=True)
        stops[i] = np.isin(ids[i], stop)
    *whole, temperature = np.array(of_kept, dtype=float).reshape(-1, 7).T
    own, wave, mates_, number_, at, level = (column.astype(int) for column in whole)
    beyond, most, levels = np.array(of_all, dtype=float).reshape(-1, 3).T
    return Places(
        logs=powered(logs / temperature[:, None], 1.0),
        ids=ids,
        stops=stops,
        own=own,
        wave=wave,
        mate=mates_,
        answer=number_,
        place=at,
        level=level,
        temperature=temperature,
        beyond=beyond > 0,
        most=most,
        levels=levels,
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
