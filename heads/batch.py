"""What a head learns from and what it gives back.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


class Movable:
    """A dataclass that holds tensors and goes to a device as a whole."""

    def to(self, device: torch.device) -> Self:
        """Return the same on `device`. A copy to the host is waited for: torch gives it out
        unfilled."""
        ahead = device.type != "cpu"
        return moved(self, lambda t: t.to(device, non_blocking=ahead))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Batch(Movable):
    """Training rows, right-padded.

    ids: [B, T] int64 tokens, 0 in the padding. mask: [B, T] bool, real tokens.
    loss_mask: [B, T] bool, token t is supervised (assistant text): what counts is the mask of
        the *predicted* token.
    sample_ids: [B] int64, always on the CPU: number of the row in the data set; names rows in
        errors and keys feature noise.
    plan: what a head's `plan` found out about the batch, None: nobody has asked.
    known: what `sizes` says, None: not known to the host yet."""

    ids: Tensor
    mask: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    plan: Any = None
    known: list[int] | None = None

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        known = self.known if device.type == self.ids.device.type else self.sizes()
        return dataclasses.replace(super().to(device), sample_ids=self.sample_ids, known=known)

    def pinned(self) -> Batch:
        """Return the same batch in memory from which a GPU copies without making the host wait."""
        return moved(self, Tensor.pin_memory)

    def depth(self) -> Tensor:
        """[B * T] int64: how many tokens of its row stand before each token."""
        return torch.arange(self.ids.shape[1], device=self.ids.device).repeat(self.ids.shape[0])

    def supervised(self, past: int) -> Tensor:
        """[n] int64, flat places of the supervised tokens that have so many tokens of their
        row before them."""
        flat = (self.loss_mask & self.mask).reshape(-1).nonzero()[:, 0]
        return flat[self.depth()[flat] >= past]

    def sizes(self) -> list[int]:
        """Return the tokens of every row."""
        return self.mask.sum(1).tolist() if self.known is None else self.known


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor, or whatever holds tensors in dataclasses and tuples, with `move`
    applied to each; everything else as it is."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(moved(part, move) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: moved(v, move) for k, v in fields.items()})
    return value


def hash_u63(*values: int | str) -> int:
    """Return a seed for torch.Generator from any address."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class LossOut:
    """What a head's forward returns. The loop divides once, by the global count.

    sum: scalar with gradient, summed over the supervised tokens. count: scalar, the supervised
    tokens, a number that depends on the data alone. stats: name -> [2] (sum, count), added up
    over ranks and micro-batches, then divided."""

    sum: Tensor
    count: Tensor
    stats: dict[str, Tensor]
