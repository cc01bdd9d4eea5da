"""Where tokens stand among the likeliest ones of their places, which is what servers tell of
a distribution.

A token among them is, given that it is among them, a draw from their probabilities to the
power 1 / temperature, divided by their sum: whatever lies beyond them, and whether the server
cut it off or not. How often a token lies beyond them is bounded.

Shape letters: N tokens, n of them among the likeliest, K tokens of a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.scripts.certificate.temperature import powered

MARGIN = 0.02  # of top_p, within which rounding may move the edge
EDGE = 0.25  # nats by which a token may fall short of a truncation's edge: rounding
# share of the tokens that may lie beyond a truncation all the same: top_k's, and top_p's, whose
# edge moves with the temperature
ROUNDED, MOVED = 0.003, 0.005
LARGEST = 1 << 18  # tokens of a vocabulary


Ranked = list[tuple[int, float]]


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
    """Tokens that are among the likeliest ones of their places. logs: [n, K]
    log-probabilities at the temperature asked for, given that, the likeliest first, -inf
    where there is none; ids: [n, K], -1 there; stops: [n, K] bool, those that end the answer;
    own: [n] index of the token; where: [n, 4] wave, place, answer of its wave, answer; level,
    temperature: [n].

    Of all tokens [N]: beyond, not among the likeliest; most, how probable that was at most;
    levels. ignored: truncations beyond which an answer's very first token lies, asked for by
    itself: there the server cuts nothing off.
    """

    logs: np.ndarray
    ids: np.ndarray
    stops: np.ndarray
    own: np.ndarray
    where: np.ndarray
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

    def only(self, mask: np.ndarray) -> Places:
        """Those of [n] bool."""
        names = ("logs", "ids", "stops", "own", "where", "level", "temperature")  # [n]
        return replace(self, **{name: getattr(self, name)[mask] for name in names})


def places(answers: Sequence[JudgedAnswer], best: int) -> Places:
    """best: how many likeliest tokens every row holds at least; a row may hold the text's own
    token besides."""
    fewest = min((answer.level for answer in answers), default=1)
    ignored = frozenset(
        answer.cut
        for answer in answers
        if answer.level == fewest and answer.tokens and _ends(answer, 0, best)
        if _beyond(answer, 0, best)
    )
    found: list[tuple[Ranked, int]] = []
    where: list[tuple[int, ...]] = []
    about: list[tuple[float, ...]] = []
    every: list[tuple[float, ...]] = []
    mates: dict[int, int] = {}
    for number, answer in enumerate(answers):
        mate = mates[answer.wave] = mates.get(answer.wave, -1) + 1
        for place, token in enumerate(answer.tokens):
            kept, many = _likeliest(answer, place, best)
            cut = answer.cut not in ignored and _ends(answer, place, best)
            rounded = ROUNDED if answer.top_k else MOVED
            most = rounded if cut else beyond_at_most(many, answer.temperature)
            every.append((_beyond(answer, place, best), most, answer.level))
            at = next((i for i, (other, _) in enumerate(kept) if other == token), -1)
            if at >= 0:
                found.append((kept, at))
                where.append((answer.wave, place, mate, number))
                about.append((answer.level, answer.temperature))
    width = max((len(kept) for kept, _ in found), default=1)
    ids = np.full((len(found), width), -1)
    logs = np.full((len(found), width), -np.inf)
    stops = np.zeros((len(found), width), dtype=bool)
    for i, (kept, _) in enumerate(found):
        stops[i, : len(kept)] = [token in answers[where[i][3]].stop for token, _ in kept]
        ids[i, : len(kept)], logs[i, : len(kept)] = zip(*kept, strict=True)
    level, temperature = np.array(about, dtype=float).reshape(-1, 2).T
    counts = np.array(every, dtype=float).reshape(-1, 3).T
    own = np.array([at for _, at in found], dtype=int)
    stand = np.array(where, dtype=int).reshape(-1, 4)
    logs = powered(logs / temperature[:, None], 1.0)
    beyond = counts[0].astype(bool)
    known = (logs, ids, stops, own, stand, level, temperature, beyond)
    return Places(*known, counts[1], counts[2], ignored)


def _likeliest(answer: JudgedAnswer, place: int, best: int) -> tuple[Ranked, Ranked]:
    """The likeliest tokens, as many as any truncation leaves; and those that it may leave."""
    ranked = sorted(answer.rows[place].items(), key=lambda pair: (-pair[1], pair[0]))
    ranked = ranked[: min(best, answer.top_k or best)]
    if answer.top_p == 1:
        return ranked, ranked
    logs = np.array([value for _, value in ranked]) / answer.temperature
    mass = np.exp(logs - np.logaddexp.reduce(logs))
    before = mass.cumsum() - mass
    least = 1 - beyond_at_most(ranked, answer.temperature)  # what they hold of all tokens
    few, many = before < answer.top_p - MARGIN, before * least < answer.top_p + MARGIN
    return ranked[: int(few.sum())], ranked[: int(many.sum())]


def _ends(answer: JudgedAnswer, place: int, best: int) -> bool:
    """Whether a truncation that was asked for ends among the likeliest."""
    return bool(answer.cut) and len(_likeliest(answer, place, best)[1]) < best


def _beyond(answer: JudgedAnswer, place: int, best: int) -> bool:
    """Whether the token is not among the likeliest, nor within rounding of the last of these."""
    token, row = answer.tokens[place], answer.rows[place]
    _, kept = _likeliest(answer, place, best)
    near = answer.cut and row.get(token, -math.inf) >= kept[-1][1] - EDGE
    return not near and all(token != other for other, _ in kept)


def beyond_at_most(kept: Sequence[tuple[int, float]], temperature: float) -> float:
    """The most that all tokens beyond these may hold at a temperature. With b = 1 /
    temperature and what they hold at 1, r: none is likelier than the last of these, so the
    sum of their p^b is r p_last^(b - 1) at most for b > 1; for b < 1 it is largest where all
    are alike."""
    logs = np.array([value for _, value in kept])
    b, rest = 1 / temperature, max(1 - math.fsum(np.exp(logs)), 1e-6)
    if b >= 1:
        beyond = math.log(rest) + (b - 1) * float(logs[-1])
    else:
        beyond = b * math.log(rest) + (1 - b) * math.log(LARGEST)
    return 1 / (1 + math.exp(float(np.logaddexp.reduce(b * logs)) - beyond))
