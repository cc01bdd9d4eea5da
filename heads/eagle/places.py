"""Which row of a training pass does what at which step: a function of the tokens' masks and the
number of steps alone, made where the batch is made, so that no device has to be asked for it.

Shape letters: B rows, T positions, S steps, n supervised tokens, R rows that later steps go on
with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from heads.batch import Batch, moved


@dataclass(frozen=True)
class Layout:
    """Where documents and rows of a training pass lie. What is a list or a number is known to
    the host: no device is asked for it.

    shape: (B, T) of step 0. rows: [n] int64 flat positions that later steps go on with,
    ascending. starts: flat positions where documents begin, ascending; the padding may be one
    more. counts: rows of each document. reaches: tokens of each document up to its last row.
    cuts: [documents + 1] int32, `starts` and the end, where `rows` are. host: `rows` as an
    array that the host can read. window: how many keys of step 0 a row sees at most, up to its
    own place; 0 = all.
    """

    shape: tuple[int, int]
    rows: Tensor
    starts: list[int]
    counts: list[int]
    reaches: list[int]
    cuts: Tensor
    host: np.ndarray
    window: int = 0

    @classmethod
    def of(cls, shape: tuple[int, int], rows: Tensor, position: Tensor | None = None) -> Layout:
        """position: [B, T] int64 places of packed tokens in their documents, None: rows are
        documents. Reads `rows` and `position` back where they are on a device."""
        total = shape[0] * shape[1]
        starts = list(range(0, total, shape[1]))
        if position is not None:
            starts = (position.reshape(-1).cpu() == 0).nonzero()[:, 0].tolist()
        here, edges = rows.cpu(), torch.tensor([*starts, total])
        bounds = torch.searchsorted(here, edges)
        last = torch.cat([here.new_full((1,), -1), here])[bounds[1:]]
        counts = bounds.diff()
        reaches = torch.where(counts > 0, last + 1 - edges[:-1], 0)
        cuts = edges.to(torch.int32).to(rows.device)
        return cls(shape, rows, starts, counts.tolist(), reaches.tolist(), cuts, here.numpy())

    def seen(self, window: int) -> Layout:
        """The same with that window; one that no document fills is none."""
        return replace(self, window=window if 0 < window < self.longest else 0)

    @property
    def edges(self) -> list[int]:
        """`starts` and the end."""
        return [*self.starts, self.shape[0] * self.shape[1]]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max((end - start for start, end in pairwise(self.edges)), default=0)


@dataclass(frozen=True)
class Places:
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
    layout: Layout

    @classmethod
    def of(cls, batch: Batch, steps: int) -> Places:
        """Of a batch on the CPU; of one elsewhere it reads the masks back."""
        device = batch.ids.device
        here = batch.to(torch.device("cpu"))
        depth = here.depth()
        flat = (here.loss_mask & here.mask).reshape(-1).nonzero()[:, 0]
        flat = flat[depth[flat] > 1]
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
            Layout.of((count, length), keep, here.position),
        )
        return found if device.type == "cpu" else found.to(device)

    def to(self, device: torch.device) -> Places:
        """The same on `device`."""
        return moved(self, lambda t: t.to(device, non_blocking=True))  # type: ignore[no-any-return]


def spread(x: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
    """[n, ..] -> [B * T, ..], zeros where no row is."""
    if rows is None:
        return x
    count, length = layout.shape
    return x.new_zeros(count * length, *x.shape[1:]).index_copy_(0, rows, x)


def side_by_side(x: Tensor) -> Tensor:
    """[B, h, T, hd] -> [B * T, h, hd]."""
    return x.transpose(1, 2).flatten(0, 1)


def unpack(x: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
    """[n, H, c] -> [B, H, T, c], zeros where no row is."""
    return spread(x, layout, rows).unflatten(0, layout.shape).transpose(1, 2)


def pack(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, H, T, c] -> [n, H, c]."""
    x = side_by_side(x)
    return x if rows is None else x.index_select(0, rows)
