"""Counter-based random numbers, keyed by (seed, request, cycle, node, purpose), so nothing
depends on what was drawn before it.

u(seed, request, cycle, node, purpose) is a counter-based hash (the SplitMix64 finaliser,
Steele et al. 2014, chained over the address), so the same seed gives the same tokens in any
batch position, batch size and process, and no global generator is read. Purposes differ, hence
the draft draw, the acceptance test and the residual draw of one node never share a number.

Shape letters: R rows in hand, S support size, M tests in a row.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from outrider.decode import devices

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
# Two-level inverse CDF: a full-vocabulary cumulative sum in float64 would cost ten times more.
_BLOCK = 256
_BELOW_ONE = 1 - 2.0**-53  # the largest float64 below 1


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


def _numbers(base: Tensor, node: Tensor, purpose: Tensor | int) -> Tensor:
    """Uniforms of `node` [..] of the cycles that hash to `base` [..], for a purpose each."""
    bits = _mix(_mix(base ^ (node + 1)) ^ purpose)
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


class Coins(Protocol):
    """What verification asks of its random numbers (Rng, or an enumerator)."""

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...
    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...


class Rng:
    """The random numbers of one cycle of B requests.

    seed: any Python int. requests, cycles: [B] int64, which request a row serves and how often
        it has cycled.
    """

    def __init__(self, seed: int, requests: Tensor, cycles: Tensor) -> None:
        self._address = seed, requests, cycles
        self._span = 0
        self._tables: Tensor | None = None

    def reserve(self, nodes: int) -> None:
        """Nothing but the nodes of drafts of at most so many will be asked for: all numbers
        are made together, where the requests are (on the host), and sent to the device in
        one piece."""
        self._span, self._tables = 2 * nodes + 1, None

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
        rows = rows.view(-1, *[1] * (node.dim() - 1)) if node.dim() > 1 else rows
        if not self._span:
            return _numbers(self._base[rows], node, purpose)
        if self._tables is None or self._tables.device != node.device:
            nodes = torch.arange(self._span + 1)
            nodes[-1] = -1  # behind all others, where the index -1 finds it
            purposes = torch.tensor([[[DRAFT]], [[ACCEPT]], [[RESIDUAL]]])
            self._tables = devices.send(_numbers(self._base[:, None], nodes, purposes), node.device)
        return self._tables[purpose - 1][rows, node]

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Index [R] of the first of M independent tests [R, M] to succeed (u <
        probability); the last must have probability 1."""
        return (self.uniform(rows, node, ACCEPT) < probability).view(torch.uint8).argmax(1)

    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Return indices [R] into unnormalised `weights` [R, S], for the token emitted
        after `node` [R]: never one of weight 0."""
        if weights.shape[1] == 1:
            return torch.zeros_like(rows)
        index = inverse_cdf(weights, self.uniform(rows, node, RESIDUAL))
        if devices.on_cpu(weights):
            return index
        # On an accelerator a running sum rounds at every place in its own way, and so may seem
        # to grow where nothing is added.
        mass = weights.gather(1, index[:, None])[:, 0]
        return torch.where(mass > 0, index, weights.argmax(1))

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Return indices [R] into unnormalised `weights` [R, S], for draft token number
        `node` [R]."""
        return inverse_cdf(weights, self.uniform(rows, node, DRAFT))


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
    """[R, 1] first index with cumulative > goal. A uniform is at most _BELOW_ONE, so its
    product with a total rounds to less than the total, and there is one; the last index
    where the total is 0 or NaN."""
    index = torch.searchsorted(cumulative, goal, right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)
