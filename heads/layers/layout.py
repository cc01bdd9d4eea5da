"""Where documents and rows of a training pass lie, as the attention kernels want to know it.

Shape letters: B rows, T positions, n rows that later steps go on with, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PassLayout:
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
    def of(cls, shape: tuple[int, int], rows: Tensor, position: Tensor | None = None) -> PassLayout:
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

    def seen(self, window: int) -> PassLayout:
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


def spread(x: Tensor, layout: PassLayout, rows: Tensor | None) -> Tensor:
    """[n, ..] -> [B * T, ..], zeros where no row is."""
    if rows is None:
        return x
    count, length = layout.shape
    return x.new_zeros(count * length, *x.shape[1:]).index_copy_(0, rows, x)


def side_by_side(x: Tensor) -> Tensor:
    """[B, h, T, hd] -> [B * T, h, hd]."""
    return x.transpose(1, 2).flatten(0, 1)


def unpack(x: Tensor, layout: PassLayout, rows: Tensor | None) -> Tensor:
    """[n, H, c] -> [B, H, T, c], zeros where no row is."""
    return spread(x, layout, rows).unflatten(0, layout.shape).transpose(1, 2)


def pack(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, H, T, c] -> [n, H, c]."""
    x = side_by_side(x)
    return x if rows is None else x.index_select(0, rows)
