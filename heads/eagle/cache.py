"""What drafters with attention layers remember: keys and values of its layers per row.

Shape letters: b rows of a pass, Hkv key heads, hd head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LlamaConfig


class Layers(Protocol):
    """What a cache is shaped after: the config of the draft layers."""

    config: LlamaConfig


class DraftCache:
    """Keys and values [layers, rows, Hkv, slots, hd] of the draft layers; slot = position,
    rows end where they end. low, reach: the slots that the rows of a pass may look at, from low
    on; window: how far back they look, 0 = to the beginning.
    """

    window = 0

    def __init__(
        self, net: Layers, rows: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        c = net.config
        shape = [
            c.num_hidden_layers,
            rows,
            int(c.num_key_value_heads or 0),
            slots,
            int(c.head_dim or 0),
        ]
        # Zeros: a hidden slot has weight 0, and 0 * NaN would still be NaN.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.rows, self.low, self.reach, self.start = slice(0, 0), 0, 0, 0
        self.slots: tuple[Tensor, Tensor] | None = None

    def aim(self, rows: slice, lengths: list[int], ahead: int, new: int) -> Tensor:
        """The next pass writes `new` entries per row of `rows` from slot length + ahead on:
        returns [b or 1, new].
        """
        device = self.keys.device
        self.rows, self.reach, self.start = rows, max(lengths) + ahead + new, lengths[0] + ahead
        self.low = max(0, min(lengths) + 1 - self.window) if self.window else 0
        even = len(lengths) == 1 or min(lengths) == max(lengths)
        if even:
            self.slots = None
            return torch.arange(self.start, self.start + new, device=device)[None]
        place = torch.tensor(lengths, device=device)[:, None] + torch.arange(
            ahead, ahead + new, device=device
        )
        self.slots = (torch.arange(rows.start, rows.stop, device=device)[:, None], place)
        return place

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: write [b, Hkv, new, hd], return what the rows may
        look at.
        """
        out = []
        for buffer, new in ((self.keys[layer], key), (self.values[layer], value)):
            if self.slots is None:
                buffer[self.rows, :, self.start : self.start + new.shape[2]] = new
            else:
                buffer[self.slots[0], :, self.slots[1]] = new.transpose(1, 2)
            out.append(buffer[self.rows, :, self.low : self.reach])
        return out[0], out[1]

    def back(self, places: Tensor) -> Tensor:
        """[.., w] positions of rows -> [.., w, reach - low] bool, the slots that each may look
        at where slots are positions."""
        slot = torch.arange(self.low, self.reach, device=places.device)
        seen = slot <= places[..., None]
        return seen & (slot > places[..., None] - self.window) if self.window else seen

    def select(self, rows: list[int], longest: int) -> None:
        """Move live rows `rows` to the front, in this order."""
        for buffer in (self.keys, self.values):
            buffer[:, : len(rows), :, :longest] = buffer[:, rows, :, :longest]
