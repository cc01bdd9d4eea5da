"""What an EAGLE drafter remembers: keys and values of its layers per row, and the layout of the trees that it grows.

Shape letters: b rows of a pass, Hkv key heads, hd head size, B rows, N nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode.tree import Layout
from heads.eagle_net import EagleNet


class DraftCache:
    """Keys and values [layers, rows, Hkv, slots, hd] of the draft layers; slot = position, rows end where they end."""

    def __init__(self, net: EagleNet, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        c = net.config
        shape = [c.num_hidden_layers, rows, int(c.num_key_value_heads or 0), slots, int(c.head_dim or 0)]
        # Zeros: a hidden slot has weight 0, and 0 * NaN would still be NaN.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.rows, self.reach, self.start = slice(0, 0), 0, 0
        self.slots: tuple[Tensor, Tensor] | None = None

    def aim(self, rows: slice, lengths: list[int], ahead: int, new: int) -> Tensor:
        """The next pass writes `new` entries per row of `rows` from slot length + ahead on: returns [b or 1, new]."""
        device = self.keys.device
        self.rows, self.reach, self.start = rows, max(lengths) + ahead + new, lengths[0] + ahead
        even = len(lengths) == 1 or min(lengths) == max(lengths)
        if even:
            self.slots = None
            return torch.arange(self.start, self.start + new, device=device)[None]
        place = torch.tensor(lengths, device=device)[:, None] + torch.arange(ahead, ahead + new, device=device)
        self.slots = (torch.arange(rows.start, rows.stop, device=device)[:, None], place)
        return place

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: write [b, Hkv, new, hd], return what the rows may look at."""
        out = []
        for buffer, new in ((self.keys[layer], key), (self.values[layer], value)):
            if self.slots is None:
                buffer[self.rows, :, self.start : self.start + new.shape[2]] = new
            else:
                buffer[self.slots[0], :, self.slots[1]] = new.transpose(1, 2)
            out.append(buffer[self.rows, :, : self.reach])
        return out[0], out[1]

    def select(self, rows: list[int], longest: int) -> None:
        """Move live rows `rows` to the front, in this order."""
        for buffer in (self.keys, self.values):
            buffer[:, : len(rows), :, :longest] = buffer[:, rows, :, :longest]


def tree_layout(parents: Tensor, depth: Tensor, levels: int) -> Layout:
    """Layout of a dynamic tree whose depths [B, N] are known: a few operations per level, where Layout.of takes some
    per node."""
    count, n = parents.shape
    slot = torch.arange(n + 1, device=parents.device)
    up = torch.cat([parents.new_zeros(count, 1), parents + 1], 1)
    own = torch.eye(n + 1, dtype=torch.bool, device=parents.device)
    mask = own.expand(count, n + 1, n + 1)
    for _ in range(levels):
        mask = own | mask.gather(1, up[..., None].expand(-1, -1, n + 1))
    sibling = (parents[:, :, None] == parents[:, None, :]) & (slot[:n, None] > slot[None, :n])
    rank = sibling.sum(-1)
    width = int(rank.max()) + 1 if n else 0
    children = torch.full((count, n + 1, width), -1, dtype=torch.int64, device=parents.device)
    rows = torch.arange(count, device=parents.device)[:, None].expand(count, n)
    children[rows, parents + 1, rank] = slot[:n].expand(count, n)
    return Layout(parents, depth, mask, children, rank, levels)
