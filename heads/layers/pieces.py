"""The element-wise work between the products of draft layers, as functions of tensors alone:
training on a GPU may run them compiled in place of what stands here (train/compiled.py).

Shape letters: D width, H heads, n positions, hd head size, I the MLP's width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

NAMES = ("normed", "gated", "turned")


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of [.., D], in x's dtype; statistics in float32 or better. weight: [D]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = (norm.square() / x.shape[-1] + eps).rsqrt().to(x.dtype)
    return x * scale * weight.to(x.dtype)


def gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """What an MLP's last product reads, [.., I]."""
    return act(gate) * up


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [B, H, n, hd] at the rotary positions of cos and sin, [B or 1, n, hd]."""
    return x * cos[:, None] + rotate_half(x) * sin[:, None]
