"""A token from weights and one uniform number: what every draw of a draft and of a verification
comes to.

Shape letters: R rows in hand, S support size.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Two-level inverse CDF: a full-vocabulary cumulative sum in float64 would cost ten times more.
_BLOCK = 256
_BELOW_ONE = 1 - 2.0**-53  # the largest float64 below 1


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Index of the first weight whose cumulative sum exceeds u * total. weights [R, S] >= 0, u
    [R] in [0, 1): [R].

    Where sums run from left to right, as on a CPU, a weight of zero is never chosen, not at
    u = 0 either; the last index where there is no mass. Sums run in float64.
    """
    rows, size = weights.shape
    if size == 1:
        return torch.zeros(rows, dtype=torch.int64, device=weights.device)
    if size > 4 * _BLOCK and size % _BLOCK == 0:
        blocks = weights.view(rows, -1, _BLOCK)
        mass = blocks.sum(-1, dtype=torch.float64)
        cumulative = mass.cumsum(-1)
        goal = u.to(torch.float64)[:, None] * cumulative[:, -1:]
        block = _first_above(cumulative, goal)
        before = (cumulative - mass).gather(1, block)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].to(torch.float64)
        running = inside.cumsum(-1)
        # The block's own running sum may differ from its total in the last bit: keep the goal
        # inside the block. Below 0 it would find the first weight, whatever it is.
        rest = torch.minimum((goal - before).clamp_(min=0), running[:, -1:] * _BELOW_ONE)
        return (block * _BLOCK + _first_above(running, rest))[:, 0]
    cumulative = weights.to(torch.float64).cumsum(-1)
    return _first_above(cumulative, u.to(torch.float64)[:, None] * cumulative[:, -1:])[:, 0]


def _first_above(cumulative: Tensor, goal: Tensor) -> Tensor:
    """[R, 1] first index with cumulative > goal. A uniform is at most _BELOW_ONE, so its product
    with a total rounds to less than the total, and there is one; the last index where the total
    is 0 or NaN."""
    index = torch.searchsorted(cumulative, goal, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)
