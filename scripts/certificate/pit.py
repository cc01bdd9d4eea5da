"""Probability integral transforms of emitted tokens (uniformity.py tests them).

If token x_t is drawn from the distribution p_t given everything before it, then U_t = F(x_t-) + V_t
p_t(x_t), with the tokens in any order that was fixed before the draw and V_t an independent
uniform, is uniform given everything before it: the U_t of a whole run are independent
uniforms, whatever the distributions (Rosenblatt 1952; Brockwell 2007 for the randomised form).

The distribution is written here a second time, from its documentation and not from
decode/sampling.py: a bug there shows.

Shape letters: R tokens, V vocabulary, O orders of the tokens, n sample size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.decode.sampling import Sampling

FEW = 512  # best tokens that nearly every truncation's edge lies among
# of a score, relative: what float32 loses between a logit and the edge of a truncation
TOLERANCE = 1e-6


@dataclass
class TokenPlaces:
    """Where tokens stand in their distributions, ordered by probability (descending, ties by
    token id).

    below: mass of the tokens before them; mass: their own; both [R] float64. outside: [R] bool,
    own mass 0. edge: [R] bool, inside only because the edge of a truncation gave way by float32's
    tolerance; edge mass: [R] float64, the mass that the distribution gains there. distribution:
    [R, V] float64.
    """

    below: np.ndarray
    mass: np.ndarray
    outside: np.ndarray
    edge: np.ndarray
    edge_mass: np.ndarray
    distribution: Tensor


def places(
    logits: Tensor, tokens: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
) -> TokenPlaces:
    """Places of `tokens` [R] in the distributions of `logits` [R, V]. histories: R id lists,
    for what depends on them.

    The decoder cuts its distribution in float32 and this in float64, so a token may fall in
    there and out here. Such a token is placed in the distribution that is wider by the
    tolerance, and counted: see `edge_test`.
    """
    scores = processed(logits.double(), sampling, histories) / sampling.temperature
    strict, wide = _edges(scores, sampling)
    own = scores.gather(1, tokens[:, None])
    between = (scores >= wide) & (scores < strict)
    edge_mass = torch.zeros_like(own[:, 0])
    if bool(between.any()):
        edge_mass = (scores.masked_fill(scores < wide, -torch.inf).softmax(-1) * between).sum(-1)
    edge = (own < strict) & (own >= wide) & ~own.isneginf()
    distribution = scores.masked_fill(scores < torch.where(edge, wide, strict), -torch.inf).softmax(
        -1
    )
    ids = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (ids < tokens[:, None]))
    mass = distribution.gather(1, tokens[:, None])[:, 0]
    below = (distribution * before).sum(-1)
    a, b, c, d, e = (x.cpu().numpy() for x in (below, mass, mass == 0, edge[:, 0], edge_mass))
    return TokenPlaces(a, b, c, d, e, distribution)


def distribution_of(
    logits: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
) -> Tensor:
    """The distributions [R, V] of `logits` [R, V], in their own precision, float32 at least."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    scores = processed(scores, sampling, histories) / sampling.temperature
    strict, _ = _edges(scores, sampling)
    return scores.masked_fill(scores < strict, -torch.inf).softmax(-1)


def processed(
    scores: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
) -> Tensor:
    """`scores` [R, V] after the repetition penalty, each row by its history."""
    if not sampling.uses_history:
        return scores
    rows = []
    for row, history in zip(scores, histories, strict=True):
        ids, row = torch.tensor([list(history)], device=scores.device), row[None].clone()
        penalty, seen = sampling.repetition_penalty, ids.unique()
        row[0, seen] = torch.where(row[0, seen] < 0, row[0, seen] * penalty, row[0, seen] / penalty)
        rows.append(row)
    return torch.cat(rows) if rows else scores


def _edges(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[R, 1] twice: the lowest score that top-k, top-p and min-p let through (-inf without
    them), exactly, and when every score may be off by the tolerance."""
    none = torch.full_like(scores[:, :1], -torch.inf)
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return none, none
    strict, wide = none, none
    size = scores.shape[1]
    # a whole sort costs ten times as much
    ordered = scores.topk(min(size, max(FEW, sampling.top_k)), -1).values
    off = TOLERANCE * (1 + scores.masked_fill(scores.isneginf(), 0).abs().amax(-1, keepdim=True))
    if sampling.top_k:
        strict = ordered[:, sampling.top_k - 1 : sampling.top_k]
        wide = strict - off
    if sampling.top_p < 1:
        total = scores.masked_fill(scores < strict, -torch.inf).logsumexp(-1, keepdim=True)
        shares = (sampling.top_p, sampling.top_p + 2 * off)
        both = [_nucleus(scores, ordered, strict, total, share) for share in shares]
        strict, wide = torch.maximum(strict, both[0]), torch.maximum(wide, both[1] - off)
    if sampling.min_p:
        least = ordered[:, :1] + math.log(sampling.min_p)
        strict, wide = torch.maximum(strict, least), torch.maximum(wide, least - off)
    return strict, wide


def _nucleus(
    scores: Tensor, ordered: Tensor, edge: Tensor, total: Tensor, share: float | Tensor
) -> Tensor:
    """The lowest score [R, 1] of the fewest tokens above `edge` with `share` of exp(total)."""
    distribution = (ordered.masked_fill(ordered < edge, -torch.inf) - total).exp()
    count = (distribution.cumsum(-1) - distribution < share).sum(-1, keepdim=True).clamp(min=1)
    found = ordered.gather(1, count - 1)
    # more tokens than were ordered
    rows = (distribution.sum(-1, keepdim=True) < share)[:, 0].nonzero()[:, 0]
    if rows.numel() and ordered.shape[1] < scores.shape[1]:
        every = scores[rows].sort(-1, descending=True).values
        some = share[rows] if isinstance(share, Tensor) else share
        found[rows] = _nucleus(every, every, edge[rows], total[rows], some)
    return found
