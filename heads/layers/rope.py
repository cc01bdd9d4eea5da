"""Rotary positions of draft layers, and the networks that have such layers.

Shape letters: hd head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Rope = tuple[Tensor, Tensor]  # cos, sin, each [.., hd]
STEADY = ("default", "linear", "llama3", "yarn")  # rotary types of one set of angles
SHORTEST = 1024  # positions of a table that is kept


def rope_table(config: LlamaConfig, length: int, dtype: torch.dtype, device: torch.device) -> Rope:
    """cos and sin [length, hd] of positions 0 .. length - 1."""
    rotary = LlamaRotaryEmbedding(config).to(device)
    positions = torch.arange(length, device=device)[None]
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
    return cos[0], sin[0]


class DraftNet(nn.Module):
    """A network of draft layers. config: theirs, of the keys `shape` of a LlamaConfig
    (heads.layers.shape.layer_config)."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.config = LlamaConfig(**shape)
        self._table: Rope | None = None

    def rope(self, length: int, dtype: torch.dtype, device: torch.device) -> Rope:
        """cos and sin [length, hd] of positions 0 .. length - 1: from a table that is kept from
        one pass to the next where the angles do not depend on the length."""
        if (self.config.rope_parameters or {}).get("rope_type", "default") not in STEADY:
            return rope_table(self.config, length, dtype, device)
        known = self._table
        there = known is not None and (known[0].dtype, known[0].device) == (dtype, device)
        if known is None or not there or known[0].shape[0] < length:
            known = self._table = rope_table(self.config, max(length, SHORTEST), dtype, device)
        return known[0][:length], known[1][:length]
