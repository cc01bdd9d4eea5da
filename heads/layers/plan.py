"""Which row of a training pass does what at which step: a function of the tokens' masks and
the number of steps alone, made where the batch is made, so that no device has to be asked
for it.

Shape letters: B rows, T positions, S steps, n supervised tokens, R rows that later steps go on
with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads.batch import Batch, Movable
from outrider.heads.layers.attention import PassLayout


@dataclass(frozen=True)
class Plan(Movable):
    """Where every part is. steps: S.

    flat: [n] int64 flat positions of the supervised tokens that some row can predict.
    valid: [S, n] bool, which of the rows that predict them exist. spot: [S, n] int64, these
    rows among the R that go on; without a row any of them. rows: [R] int64, flat positions
    of those. at: [R] int64, their positions in their documents. depth: [B, T] int64,
    positions of all tokens. layout: of documents and rows."""

    steps: int
    flat: Tensor
    valid: Tensor
    spot: Tensor
    rows: Tensor
    at: Tensor
    depth: Tensor
    layout: PassLayout

    @classmethod
    def of(cls, batch: Batch, steps: int, past: int = 2) -> Plan:
        """Plan a pass of `steps` over a batch on the CPU. past: tokens of its document that a
        supervised token must have before it."""
        shape, size, depth = batch.ids.shape, batch.ids.numel(), batch.depth()
        flat = batch.supervised(past)
        back = torch.arange(2, 2 + steps)[:, None]
        valid, source = depth[flat] >= back, (flat - back).clamp(min=0)
        needed = torch.zeros(size, dtype=torch.bool)
        needed[source[valid]] = True
        needed[0] |= not flat.numel()  # an empty pass would have no shape
        rows = needed.nonzero()[:, 0]
        number = torch.zeros(size, dtype=torch.int64)
        number[rows] = torch.arange(rows.numel())
        layout = PassLayout.of((shape[0], shape[1]), rows)
        spot, at = number[source], depth[rows]
        return cls(steps, flat, valid, spot, rows, at, depth.view(shape), layout)
