"""Probability integral transforms of emitted tokens (uniformity.py tests them).

If token x_t is drawn from the distribution p_t given everything before it, then U_t = F(x_t-) + V_t
p_t(x_t), with the tokens in any order that was fixed before the draw and V_t an independent
uniform, is uniform given everything before it: the U_t of a whole run are independent
uniforms, whatever the distributions (Rosenblatt 1952; Brockwell 2007 for the randomised form).

The distribution is written here a second time, from its documentation and not from
decode/sampling.py: a bug there shows.

Shape letters: R tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.decode.sampling import Sampling

# of a score, relative: what float32 loses between a logit and the edge of a truncation
TOLERANCE = 1e-6


@dataclass
class TokenPlaces:
    """Where tokens [R] stand in their distributions. below: mass of the tokens before them, in the
    order of probability (descending, ties by token id); below_by_id: in the order of ids; mass:
    their own; outside: it is 0."""

    below: np.ndarray
    below_by_id: np.ndarray
    mass: np.ndarray
    outside: np.ndarray


def places(
    logits: Tensor, tokens: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
) -> TokenPlaces:
    """Return places of `tokens` [R] in the distributions of `logits` [R, V]. histories: R
    id lists, for what depends on them.

    The decoder cuts its distribution in float32 and this in float64, so a token may fall in there
    and out here. A token that falls out within the tolerance is placed in the distribution that
    ends with it.
    """
    scores = processed(logits.double(), sampling, histories) / sampling.temperature
    own = scores.gather(1, tokens[:, None])
    largest = scores.masked_fill(scores.isneginf(), 0).abs().amax(-1, keepdim=True)
    edge, wide = (_edge(scores, sampling, off) for off in (0.0, TOLERANCE * (1 + largest)))
    edge = torch.where(own >= wide, torch.minimum(edge, own), edge)
    distribution = scores.masked_fill(scores < edge, -torch.inf).softmax(-1)
    ids = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > own) | ((scores == own) & (ids < tokens[:, None]))
    mass = distribution.gather(1, tokens[:, None])[:, 0]
    masks = (before, ids < tokens[:, None])
    below, by_id = ((distribution * mask).sum(-1).cpu().numpy() for mask in masks)
    own_mass = mass.cpu().numpy()
    return TokenPlaces(below, by_id, own_mass, own_mass == 0)


def processed(
    scores: Tensor, sampling: Sampling, histories: Sequence[Sequence[int]] = ()
) -> Tensor:
    """`scores` [R, V] after the repetition penalty, each row by its history."""
    if not sampling.uses_history:
        return scores
    penalty, scores = sampling.repetition_penalty, scores.clone()
    for row, history in zip(scores, histories, strict=True):
        seen = torch.tensor(sorted(set(history)), device=scores.device)
        row[seen] = torch.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    return scores


def _edge(scores: Tensor, sampling: Sampling, off: Tensor | float = 0.0) -> Tensor:
    """[R, 1] the lowest score that top-k, top-p and min-p let through, -inf without them. off: by
    which every score may be."""
    edge = torch.full_like(scores[:, :1], -torch.inf)
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return edge
    ordered = scores.sort(-1, descending=True).values
    if sampling.top_k:
        edge = ordered[:, sampling.top_k - 1 : sampling.top_k]
    if sampling.top_p < 1:  # the fewest tokens that hold so much of what top-k leaves
        mass = ordered.masked_fill(ordered < edge, -torch.inf).softmax(-1)
        before = mass.cumsum(-1) - mass
        share = sampling.top_p + 2 * off
        count = (before < share).sum(-1, keepdim=True).clamp(min=1)
        edge = torch.maximum(edge, ordered.gather(1, count - 1))
    if sampling.min_p:
        edge = torch.maximum(edge, ordered[:, :1] + math.log(sampling.min_p))
    return edge - off
