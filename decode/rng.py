"""Addressed random numbers: every draw has a name, so nothing depends on what was drawn before
it.

u(seed, request, cycle, node, purpose) is a counter-based hash (the SplitMix64 finaliser,
Steele et al. 2014, chained over the address), so the same seed gives the same tokens in any
batch position, batch size and process, and no global generator is read. Purposes differ, hence
the draft draw, the acceptance test and the residual draw of one node never share a number.

Shape letters: R rows in hand, S support size, M tests in a row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
# Two-level inverse CDF: a full-vocabulary cumulative sum in float64 would cost ten times more.
_BLOCK = 256


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX1, _MIX2 = (
    _signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64 finaliser on int64 (wrapping); >> on int64 is arithmetic, so the sign bits
    are masked off.
    """
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Index of the first weight whose cumulative sum exceeds u * total. weights [R, S] >= 0, u
    [R] in [0, 1): [R].

    A weight of zero is never chosen, not at u = 0 either. Sums run in float64.
    """
    rows, size = weights.shape
    if size == 1:
        return torch.zeros(rows, dtype=torch.int64, device=weights.device)
    if size > 4 * _BLOCK and size % _BLOCK == 0:
        blocks = weights.view(rows, -1, _BLOCK)
        mass = blocks.sum(-1, dtype=torch.float64)
        cumulative = mass.cumsum(-1)
        goal = u.to(torch.float64)[:, None] * cumulative[:, -1:]
        block = _first_above(cumulative, mass, goal)
        before = (cumulative - mass).gather(1, block)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].to(torch.float64)
        # The block's own running sum may differ from its total in the last bit: keep the goal
        # inside the block. Below 0 it would find the first weight, whatever it is.
        rest = (goal - before).clamp(min=0)
        return (block * _BLOCK + _first_above(inside.cumsum(-1), inside, rest))[:, 0]
    fine = weights.to(torch.float64)
    cumulative = fine.cumsum(-1)
    return _first_above(cumulative, fine, u.to(torch.float64)[:, None] * cumulative[:, -1:])[:, 0]


def _first_above(cumulative: Tensor, mass: Tensor, goal: Tensor) -> Tensor:
    """[R, 1] first index with cumulative > goal; where rounding leaves none, the last index
    with mass.
    """
    index = torch.searchsorted(cumulative, goal, right=True)
    size = cumulative.shape[1]
    last = size - 1 - (mass > 0).flip(1).to(torch.uint8).argmax(1, keepdim=True)
    return torch.minimum(index, last)


class Rng:
    """The random numbers of one cycle of B requests.

    seed: any Python int. requests, cycles: [B] int64, which request a row serves and how often
        it has cycled.
    """

    def __init__(self, seed: int, requests: Tensor, cycles: Tensor) -> None:
        self._address = seed, requests, cycles

    @functools.cached_property
    def _base(self) -> Tensor:
        """[B] hash of (seed, request, cycle), on first use: greedy decoding draws nothing and
        pays nothing.
        """
        seed, requests, cycles = self._address
        return _mix(_mix(_mix(torch.full_like(requests, _signed(seed))) ^ requests) ^ cycles)

    def uniform(self, rows: Tensor, node: Tensor, purpose: int) -> Tensor:
        """float64 in [0, 1) with 53 random bits, the shape of `node` (first dimension [R],
        like `rows`).
        """
        base = self._base[rows]
        base = base.view(-1, *[1] * (node.dim() - 1)) if node.dim() > 1 else base
        bits = _mix(_mix(base ^ (node + 1)) ^ purpose)
        return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53

    def accept(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Bernoulli tests [R] bool: strictly u < probability, so probability 0 is never
        accepted.
        """
        return self.uniform(rows, node, ACCEPT) < probability

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Index [R] of the first of M independent tests [R, M] to succeed; the last must have
        probability 1.
        """
        return (self.uniform(rows, node, ACCEPT) < probability).to(torch.uint8).argmax(1)

    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Indices [R] into unnormalised `weights` [R, S], for the token emitted after `node`
        [R].
        """
        if weights.shape[1] == 1:
            return torch.zeros_like(rows)
        return inverse_cdf(weights, self.uniform(rows, node, RESIDUAL))

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Indices [R] into unnormalised `weights` [R, S], for draft token number `node` [R]."""
        return inverse_cdf(weights, self.uniform(rows, node, DRAFT))
