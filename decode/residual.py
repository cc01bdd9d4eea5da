"""What the failure of drafted candidates leaves of the target's distribution: the accept
rule for one level of siblings, as functions of dense rows.

A slot is reached with probability w and has the target's distribution p. Its children x_0,
x_1, .. stand in draw order; x_j was drawn from q_j = scale_j q, which is q without its
earlier siblings' tokens, or is deterministic: then q_j is a point mass, and scale_j is 0.
With

    residual_0 = w p, and 1 - w in a column behind all tokens: the slot is not reached
    failed_j   = sum(residual_j), with that column: nobody was accepted before child j

child j is accepted with probability accept_j if its turn comes; its failure leaves
residual_j+1:

    accept_j     = min(1, residual_j(x_j) / (failed_j q_j(x_j)))
    residual_j+1 = [residual_j - failed_j q_j]+ without x_j.

In place of the normalised residual after every failure these are that one times failed_j,
so nothing is divided but what is asked for. What follows a residual of 0 (equal
distributions, up to rounding) has probability 0. Rejection takes a slot that is reached for
certain, w = 1; traversal takes w from the level above, and after all children failed the
slot itself remains with the tokens' share of residual_C.

All of it is float64, whatever dtype p comes in: products of ratios over the levels of a
draft leave the range of float32, and a quotient that became NaN would read as "nothing is
left".

Shape letters: S columns, C siblings; `..` any slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Mass and probability below it are taken for 0, so that no quotient leaves the range of float64.
NOTHING = 1e-300


class Siblings(NamedTuple):
    """Slots and their children.

    p: [.., S] float, the target's distribution after each slot. q: [.., S] float64, what
    the sampled children were drawn from, before earlier siblings were taken out; 0 where
    none was drawn. column: [.., C] int64, where in S the token of each child is; of a
    child that is not there, or whose token has no probability, a column that is 0 by its
    turn. scale: [.., C] float64, 1 / what is left of q's mass by then, 0: deterministic.
    q_token: [.., C] float64, q_j(x_j), infinite where the child could not be drawn.
    """

    p: Tensor
    q: Tensor
    column: Tensor
    scale: Tensor
    q_token: Tensor


class LevelVerdict(NamedTuple):
    """accept: [.., C] probability that each child is accepted when its turn comes.
    residual: [.., S] what is left of w p when all have failed. rest: [..] that the slot is
    accepted then."""

    accept: Tensor
    residual: Tensor
    rest: Tensor


def first_ratio(siblings: Siblings) -> Tensor:
    """p(x_0) / q_0(x_0) [..]: a first child is reached with min(1, w p(x_0) / q_0(x_0)), which
    asks for no residual."""
    column = siblings.column[..., :1]
    return (siblings.p.gather(-1, column).to(torch.float64) / siblings.q_token[..., :1])[..., 0]


def level(siblings: Siblings, reach: Tensor, out: Tensor | None = None) -> LevelVerdict:
    """Return the rule for slots that are reached with w = `reach` [..] float64. out: memory
    [.., S + 1] for the residual."""
    p, q, column, scale, q_token = siblings
    size, ranks = p.shape[-1], column.shape[-1]
    residual = q.new_empty(*reach.shape, size + 1) if out is None else out
    tokens = residual[..., :size]
    torch.mul(p, reach[..., None], out=tokens)
    residual[..., size] = (1 - reach).clamp_(min=NOTHING)
    mass, failed = list[Tensor](), [torch.ones_like(q_token[..., :1])]
    for j in range(ranks):
        token, drawn = column[..., j, None], scale[..., j, None]
        mass.append(tokens.gather(-1, token))
        tokens.addcmul_(q, drawn * failed[j] if j else drawn, value=-1).clamp_(min=0)
        # Where a child can fail nothing is left of its token, whatever q_j is.
        tokens.scatter_(-1, token, 0.0)
        failed.append(residual.sum(-1, keepdim=True))
    accept = torch.cat(mass, -1) / torch.cat(failed[:-1], -1) / q_token
    rest = tokens.sum(-1) / failed[-1][..., 0]
    return LevelVerdict(accept.clamp_(max=1), tokens, rest)
