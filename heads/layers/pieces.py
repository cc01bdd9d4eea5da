"""Norm, MLP and attention of draft layers, Llama's, and the element-wise work between their
products as functions of tensors alone: training on a GPU may run those compiled in place of
what stands here (train/compiled.py).

Shape letters: B rows, n positions, D width, H heads, hd head size, I the MLP's width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    rotate_half,
)

Rope = tuple[Tensor, Tensor]  # cos, sin, each [.., hd]
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


class RMSNorm(LlamaRMSNorm):
    """LlamaRMSNorm; statistics in float32 or better."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[.., D] -> [.., D], in the input's dtype."""
        x, weight, eps = hidden_states, self.weight, self.variance_epsilon
        if not torch.is_grad_enabled():
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        # On CPUs the backward pass of F.rms_norm takes half as long again.
        if x.dim() == 3:  # compiled, a graph for all passes of rows
            return normed(x.flatten(0, 1), weight, eps).unflatten(0, x.shape[:2])
        return normed(x, weight, eps)


class MLP(LlamaMLP):
    """LlamaMLP over `gated`."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        return self.down_proj(gated(self.act_fn, self.gate_proj(x), self.up_proj(x)))


class Attention(LlamaAttention):
    """LlamaAttention over `turned`."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Rope,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, n, D or 2 D] -> [B, n, D]."""
        given = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            product(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for product in given
        )
        query, key = (turned(x, *position_embeddings) for x in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        kwargs["scaling"] = self.scaling
        found, _ = attend(self, query, key, value, attention_mask, **kwargs)
        return self.o_proj(found.flatten(-2)), None
