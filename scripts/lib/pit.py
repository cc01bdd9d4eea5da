"""Probability integral transforms of emitted tokens, the tests of their uniformity, and what these tests can see.

If token x_t is drawn from the law p_t given everything before it, then U_t = F(x_t-) + V_t p_t(x_t), with the tokens in
any order that was fixed before the draw and V_t an independent uniform, is uniform given everything before it: the U_t
of a whole run are independent uniforms, whatever the laws (Rosenblatt 1952; Brockwell 2007 for the randomised form).
Here the order is by probability, descending, ties by token id.

The law is written here a second time, from its documentation and not from decode/sampling.py: a bug there shows.

Shape letters: R tokens, V vocabulary, n sample size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.sampling import Sampling

CELLS, PAIR_CELLS, SMALLEST = 20, 8, 200  # cells of the chi-squares; strata below SMALLEST are not tested
POWER_Z = 2.326  # 99 % of a normal
FEW = 512  # best tokens that nearly every truncation's edge lies among


@dataclass
class Places:
    """Where tokens stand in their laws. below: mass of the tokens before them in the order; mass: their own;
    top: largest mass of the law; all [R] float64. outside: [R] bool, own mass 0. edge: [R] bool, outside, but
    inside when the truncation gives way by `slack`.
    """

    below: np.ndarray
    mass: np.ndarray
    top: np.ndarray
    outside: np.ndarray
    edge: np.ndarray


def places(logits: Tensor, tokens: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = (),
           slack: float = 0.0) -> Places:  # fmt: skip
    """Places of `tokens` [R] in the laws of `logits` [R, V]. histories: R id lists, for what depends on them.

    slack: how far rounding may move a logit (the edge of a truncation gives way by as much).
    """
    scores = processed(logits.double(), sampling, histories) / sampling.temperature
    slack = slack / sampling.temperature
    own = scores.gather(1, tokens[:, None])
    floor = _edge(scores, sampling, 0.0)
    kept = scores >= floor
    law = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    ids = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (ids < tokens[:, None]))
    mass = law.gather(1, tokens[:, None])[:, 0]
    outside = mass == 0
    edge = outside & (own >= _edge(scores, sampling, slack) - slack)[:, 0] if bool(outside.any()) else outside
    answers = ((law * before).sum(-1), mass, law.amax(-1), outside, edge)
    return Places(*(a.cpu().numpy() for a in answers))


def processed(scores: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()) -> Tensor:
    """`scores` [R, V] after the logits processors and the repetition penalty, each row with its own history."""
    if not sampling.uses_history:
        return scores
    rows = []
    for row, history in zip(scores, histories, strict=True):
        ids, row = torch.tensor([list(history)], device=scores.device), row[None].clone()
        for processor in sampling.processors:
            row = processor(ids, row)
        penalty, seen = sampling.repetition_penalty, ids.unique()
        row[0, seen] = torch.where(row[0, seen] < 0, row[0, seen] * penalty, row[0, seen] / penalty)
        rows.append(row)
    return torch.cat(rows) if rows else scores


def _edge(scores: Tensor, sampling: Sampling, slack: float) -> Tensor:
    """[R, 1]: the lowest score that top-k, top-p and min-p let through; -inf without them."""
    edge = torch.full_like(scores[:, :1], -torch.inf)
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return edge
    size = scores.shape[1]
    ordered = scores.topk(min(size, max(FEW, sampling.top_k)), -1).values  # a whole sort costs ten times as much
    if sampling.top_k:
        edge = torch.maximum(edge, ordered[:, sampling.top_k - 1 : sampling.top_k])
    if sampling.top_p < 1:
        total = scores.masked_fill(scores < edge, -torch.inf).logsumexp(-1, keepdim=True)
        nucleus, held = _nucleus(ordered, edge, total, sampling.top_p + 2 * slack)
        wide = (held < sampling.top_p + 2 * slack).nonzero()[:, 0]  # more tokens than were ordered
        if wide.numel():
            every = scores[wide].sort(-1, descending=True).values
            nucleus[wide] = _nucleus(every, edge[wide], total[wide], sampling.top_p + 2 * slack)[0]
        edge = torch.maximum(edge, nucleus)
    if sampling.min_p:
        edge = torch.maximum(edge, ordered[:, :1] + math.log(sampling.min_p) - slack)
    return edge


def _nucleus(ordered: Tensor, edge: Tensor, total: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The lowest score [R, 1] of the fewest tokens that hold `share`, and the mass [R] of all that were ordered."""
    law = (ordered.masked_fill(ordered < edge, -torch.inf) - total).exp()
    count = (law.cumsum(-1) - law < share).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, count - 1), law.sum(-1)


@dataclass(frozen=True)
class Test:
    """One test of one stratum. p: probability of a value at least as extreme when every U is uniform."""

    name: str
    stratum: str
    n: int
    statistic: float
    p: float


def kolmogorov(u: np.ndarray) -> tuple[float, float]:
    """D and p of the one-sample Kolmogorov-Smirnov test against the uniform law (Stephens' finite-n argument)."""
    n = len(u)
    x = np.sort(u)
    steps = np.arange(1, n + 1) / n
    d = float(max((steps - x).max(), (x - steps + 1 / n).max()))
    at = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    if at < 0.3:
        return d, 1.0
    k = np.arange(1, 101)
    return d, float(np.clip(2 * ((-1.0) ** (k - 1) * np.exp(-2 * (k * at) ** 2)).sum(), 0, 1))


def chi_square(counts: np.ndarray) -> tuple[float, float]:
    """Statistic and p of equal expected counts."""
    expected = counts.sum() / counts.size
    value = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(counts.size - 1) / 2, value / 2], dtype=torch.float64)
    return value, float(torch.special.gammaincc(half[0], half[1]))


def uniformity(u: np.ndarray, stratum: str) -> list[Test]:
    """Kolmogorov-Smirnov and chi-square on equal cells."""
    counts = np.histogram(u, bins=CELLS, range=(0, 1))[0]
    return [Test("Kolmogorov-Smirnov", stratum, len(u), *kolmogorov(u)),
            Test("chi-square", stratum, len(u), *chi_square(counts))]  # fmt: skip


def independence(u: np.ndarray, sequence: np.ndarray) -> list[Test]:
    """Neighbours in a sequence: correlation at lag one, and a chi-square on disjoint pairs."""
    first, second = u[:-1], u[1:]
    same = sequence[:-1] == sequence[1:]
    a, b = first[same], second[same]
    if len(a) < SMALLEST:
        return []
    z = float((12 * (a - 0.5) * (b - 0.5)).sum() / math.sqrt(len(a)))
    start = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    place = np.arange(len(u)) - np.repeat(start, np.diff(np.r_[start, len(u)]))
    even = same & (place[:-1] % 2 == 0)
    table = np.histogram2d(first[even], second[even], bins=PAIR_CELLS, range=[[0, 1], [0, 1]])[0]
    return [Test("lag-1 correlation", "neighbours", len(a), z, math.erfc(abs(z) / math.sqrt(2))),
            Test("chi-square of pairs", "neighbours", int(even.sum()), *chi_square(table))]  # fmt: skip


def overall(tests: Sequence[Test]) -> float:
    """The p-value of all tests together (Bonferroni)."""
    return min(1.0, len(tests) * min((t.p for t in tests), default=1.0))


def detectable(top: np.ndarray, n: int, alpha: float, tests: int) -> dict[str, float]:
    """The smallest mean total variation between emitted and true law that a run of n tokens finds with power 0.99.

    Two biases, in every law of the run alike: the share e of tokens is replaced by the most likely token ("towards"),
    or by a draw among all others ("away"). Their U follow a known law, so the Kolmogorov-Smirnov distance grows as e
    times a constant; it is found when it exceeds the critical value at alpha / tests by 2.33 standard deviations (each
    at most 1 / (2 root n)). Infinite where even e = 1 stays below. top: [n] largest mass of each law.
    """
    needed = (math.sqrt(math.log(2 * tests / alpha) / 2) + POWER_Z / 2) / math.sqrt(max(n, 1))
    grid = np.linspace(0, 1, 201)[:, None]
    best = np.clip(top, 1e-9, 1)[None]
    others = best < 1 - 1e-9
    toward = (np.minimum(grid / best, 1) - grid).mean(1)
    away = np.where(others, np.clip((grid - best) / np.maximum(1 - best, 1e-9), 0, 1) - grid, 0).mean(1)
    found = {}
    for name, shape, cost in (("towards the most likely token", toward, float((1 - top).mean())),
                              ("away from it", away, float((top * (top < 1 - 1e-9)).mean()))):  # fmt: skip
        share = needed / max(float(np.abs(shape).max()), 1e-12)
        found[name] = share * cost if share <= 1 else math.inf
    return found
