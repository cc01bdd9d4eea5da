"""Several data files as one: their tokens stay in their own mapped files."""

from __future__ import annotations

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
