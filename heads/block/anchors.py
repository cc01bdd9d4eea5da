"""Where the blocks of a training pass begin, and what their rows predict.

A block begins at an anchor, a token whose own feature does not exist yet when its
successors are drafted. Anchors are drawn anew whenever a row comes up, a function of seed,
step and row alone: the same on any number of ranks, and after a resume.

Shape letters: B rows, T positions, A anchors of a row, K slots, n supervised slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads.base import Batch
from outrider.heads.batch import Movable, hash_u63

TWICE = 2  # how often a supervised token is predicted in an epoch, on average


@dataclass(frozen=True)
class Anchors:
    """place: [B, A] int64, ascending in a row. real: [B, A] bool, the others fill up rows, at
    the place of the last one. known: what `place` says, to the host."""

    place: Tensor
    real: Tensor
    known: list[list[int]]

    @classmethod
    def of(cls, chosen: list[list[int]], device: torch.device) -> Anchors:
        """Return rows of places, filled up to the longest one, at least one."""
        width = max(1, *map(len, chosen)) if chosen else 1
        known = [row + (row[-1:] or [0]) * (width - len(row)) for row in chosen]
        size = torch.tensor([len(row) for row in chosen])[:, None]
        place = torch.tensor(known, dtype=torch.int64).view(len(chosen), width)
        return cls(place.to(device), (torch.arange(width) < size).to(device), known)

    def labels(self, batch: Batch, slots: int) -> tuple[Tensor, Tensor]:
        """(flat place of the token that each slot predicts, [B, A, K], whether it is there)."""
        count, length = batch.ids.shape
        ahead = torch.arange(1, slots + 1, device=self.place.device)
        place = self.place[..., None] + ahead
        inside = place < length
        row = torch.arange(count, device=self.place.device)[:, None, None]
        flat = row * length + place.clamp(max=length - 1)
        return flat, inside & batch.mask.reshape(-1)[flat] & self.real[..., None]


@dataclass(frozen=True)
class Slots:
    """The supervised ones of N blocks of `size` slots. at: [n] int64, where they stand among
    all N * size. number: [n] int64, their places in their blocks."""

    at: Tensor
    number: Tensor
    size: int

    @classmethod
    def of(cls, on: Tensor) -> Slots:
        """on: [N, K] bool."""
        at = on.flatten().nonzero()[:, 0]
        return cls(at, at % on.shape[1], on.shape[1])

    def sums(self, values: Tensor) -> Tensor:
        """[K] float64, `values` [n] summed by their place in the block."""
        whole = torch.zeros(self.size, dtype=torch.float64, device=values.device)
        return whole.index_add(0, self.number, values.double())

    def decaying(self, decay: float) -> Tensor:
        """[n] float64 weights that fall to 1 / e in `decay` slots; 1 on average over a whole
        block."""
        fall = torch.exp(-torch.arange(self.size, device=self.at.device).double() / decay)
        return (fall / fall.mean())[self.number]


@dataclass(frozen=True)
class Blocks(Movable):
    """The blocks of a pass: a function of its tokens and masks, made where the batch is made,
    so that no device has to be asked for it. slots: the supervised ones. flat: [n] int64, flat
    places of the tokens that they predict."""

    anchors: Anchors
    slots: Slots
    flat: Tensor

    @classmethod
    def draw(cls, batch: Batch, count: int, slots: int, seed: tuple[int, int]) -> Blocks:
        """Return the blocks of a batch on the CPU, drawn by `draw`. A slot is supervised by
        the loss mask of its token, and so are all before it in its block."""
        anchors = draw(batch, count, slots, seed)
        flat, there = anchors.labels(batch, slots)
        on = there & batch.loss_mask.reshape(-1)[flat]
        found = Slots.of(on.cumprod(2).bool().flatten(0, 1))
        return cls(anchors, found, flat.flatten()[found.at])


def draw(batch: Batch, count: int, slots: int, seed: tuple[int, int]) -> Anchors:
    """At most `count` anchors of each document (0: as many as predict every supervised token
    TWICE), without replacement among those whose next token is supervised. batch: on the CPU.
    seed: of the run, and the step."""
    supervised = batch.loss_mask & batch.mask
    chosen: list[list[int]] = [[] for _ in range(batch.ids.shape[0])]
    sizes = batch.sizes()
    for b, (sample, size) in enumerate(zip(batch.sample_ids.tolist(), sizes, strict=True)):
        # The first token of a row has no feature before it.
        fit = supervised[b, 2:size].nonzero()[:, 0] + 1
        wanted = count or -(-TWICE * fit.numel() // slots)
        generator = torch.Generator().manual_seed(hash_u63(*seed, sample))
        some = torch.randperm(fit.numel(), generator=generator)[:wanted]
        chosen[b] += fit[some].sort().values.tolist()
    return Anchors.of(chosen, torch.device("cpu"))


def every(batch: Batch, most: int) -> list[Anchors]:
    """Return all anchors that there can be, at most so many of every row at a time."""
    chosen: list[list[int]] = [[] for _ in range(batch.ids.shape[0])]
    for b, size in enumerate(batch.sizes()):
        chosen[b] += range(1, size - 1)
    parts = range(0, max(1, *map(len, chosen)), most)
    return [Anchors.of([row[i : i + most] for row in chosen], batch.ids.device) for i in parts]
