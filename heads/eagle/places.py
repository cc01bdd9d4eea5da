"""Which row of a training pass does what at which step: a function of the tokens' masks and the
number of steps alone, made where the batch is made, so that no device has to be asked for it.

Shape letters: B rows, T positions, S steps, n supervised tokens, R rows that later steps go on
with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads.batch import Batch, Movable
from outrider.heads.layers.layout import PassLayout


@dataclass(frozen=True)
class Places(Movable):
    """Where everything stands. steps: S.

    flat: [n] int64 flat positions of the supervised tokens that some row can predict. valid:
    [S, n] bool, which of the rows that predict them exist; whole: all of them do. spot: [S, n]
    int64, these rows among the R that go on. at: [R] int64, positions of those in their
    documents. depth: [B * T] int64, positions of all tokens. layout: of documents and rows.
    """

    steps: int
    flat: Tensor
    valid: Tensor
    whole: bool
    spot: Tensor
    at: Tensor
    depth: Tensor
    layout: PassLayout

    @classmethod
    def of(cls, batch: Batch, steps: int) -> Places:
        """Of a batch on the CPU; of one elsewhere it reads the masks back."""
        device = batch.ids.device
        here = batch.to(torch.device("cpu"))
        depth = here.depth()
        flat = here.supervised(2)
        back = torch.arange(2, 2 + steps)[:, None]
        valid, source = depth[flat] >= back, (flat - back).clamp(min=0)
        needed = torch.zeros(here.ids.numel(), dtype=torch.bool)
        needed[source[valid]] = True
        needed[0] |= not flat.numel()  # an empty pass would have no shape
        keep = needed.nonzero()[:, 0]
        packed = torch.zeros(here.ids.numel(), dtype=torch.int64)
        packed[keep] = torch.arange(keep.numel())
        count, length = here.ids.shape
        found = cls(
            steps,
            flat,
            valid,
            bool(valid.all()),
            packed[source],
            depth[keep],
            depth,
            PassLayout.of((count, length), keep, here.position),
        )
        return found if device.type == "cpu" else found.to(device)
