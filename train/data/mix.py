"""Several data files as one: their tokens stay in their own mapped files, and the rows of an
epoch are drawn from each as its weight says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class File(NamedTuple):
    """Which rows of a whole a file has: `first` to the one before `end`. sha256: of its tokens
    and masks."""

    name: str
    first: int
    end: int
    sha256: str


class Joined:
    """1-d tensors end to end, never copied into one. Of what a tensor can, what token rows ask
    for."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = [*parts]
        self.starts = torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0).tolist()

    def numel(self) -> int:
        """Return how many values there are."""
        return self.starts[-1]

    def __getitem__(self, places: slice) -> Tensor:
        """The values of a slice with step 1."""
        begin, end, _ = places.indices(self.numel())
        cut = [
            part[max(begin - start, 0) : max(end - start, 0)]
            for part, start in zip(self.parts, self.starts, strict=False)
        ]
        filled = [part for part in cut if part.numel()] or cut[:1]
        return filled[0] if len(filled) == 1 else torch.cat(filled)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return how many of `total` rows each weight stands for; they add up to it. What
    rounding leaves goes to the largest remainders, the first of equal ones."""
    whole = sum(weights)
    if whole == math.inf:  # of numbers that are finite each
        weights = [weight / max(weights) for weight in weights]
        whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    found = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for i in order[: total - sum(found)]:
        found[i] += 1
    return found


def drawn(rows: Tensor, count: int, epoch: int, seed: int, number: int) -> Tensor:
    """[count] of the rows of file `number` for an epoch: the next ones of a sequence of
    permutations, so that over the epochs every row comes equally often, to one.

    rows: [R] int64, one at least.
    """
    size = rows.numel()
    begin, end = epoch * count, (epoch + 1) * count
    found = []
    for turn in range(begin // size, -(-end // size)):
        text = repr((seed, "mix", number, turn))
        own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
        order = torch.randperm(size, generator=torch.Generator().manual_seed(own))
        found.append(order[max(begin - turn * size, 0) : end - turn * size])
    return rows[torch.cat(found)]
