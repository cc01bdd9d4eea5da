"""The decoder layer of EAGLE drafters, and what all draft layers are made of: linear layers
and norms over float32 master weights, each in the dtype of its input, and rotary positions.

Serving engines run a Llama-style layer whatever the target is, so that is what is trained, by
transformers' own Llama classes, of a shape that heads/layers/shape.py takes from the target.

Shape letters: B rows, T positions, n rows of a packed pass, D width, H query heads, hd head
size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.heads.layers.pieces import MLP, Attention, RMSNorm, Rope


class Linear(nn.Linear):
    """A linear layer that computes in its input's dtype. Under autocast, which keeps the cast
    weights for all steps of a pass, that does it."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out], in x's dtype."""
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def in_input_dtype(module: nn.Module) -> nn.Module:
    """Replace the linear layers of a transformers module by new ones that compute in their
    input's dtype, in place."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            own = Linear(child.in_features, child.out_features, child.bias is not None)
            setattr(module, name, own)
        else:
            in_input_dtype(child)
    return module


class DraftLayer(nn.Module):
    """One layer. wide: the attention reads 2 D (normed embedding beside normed feature:
    EAGLE-3's first layer). norm: the input norm of an ordinary layer; absent in EAGLE-1's
    first layer, and a wide layer is given its input."""

    def __init__(self, config: LlamaConfig, index: int, wide: bool, norm: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index)
        if wide:
            for name in ("q_proj", "k_proj", "v_proj"):
                size = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(2 * width, size, bias=False))
        in_input_dtype(self.self_attn)
        self.mlp = in_input_dtype(MLP(config))
        self.input_layernorm = RMSNorm(width, eps) if norm else None
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(
        self, residual: Tensor, x: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """residual [.., D], x [.., D or 2 D]; keep: flat row numbers [n] that go on after the
        attention: [n, D]."""
        attended = self.self_attn(hidden_states=x, position_embeddings=rope, **kwargs)[0]
        if keep is not None:
            residual, attended = (
                t.flatten(0, -2).index_select(0, keep) for t in (residual, attended)
            )
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class DraftNet(nn.Module):
    """A network of draft layers. config: theirs, of the keys `shape` of a LlamaConfig
    (heads.layers.shape.layer_config)."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.config = LlamaConfig(**shape)

    def rope(self, length: int, dtype: torch.dtype, device: torch.device) -> Rope:
        """cos and sin [length, hd] of positions 0 .. length - 1."""
        return rope_table(self.config, length, dtype, device)


def run_layers(
    layers: nn.ModuleList, residual: Tensor, x: Tensor, rope: Rope, keep: Tensor | None, **kw: Any
) -> Tensor:
    """Run DraftLayers; residual and x are the first one's, `keep` the last one's."""
    for i, layer in enumerate(layers):
        if i:
            x = layer.input_layernorm(residual)  # type: ignore[operator]
        residual = layer(residual, x, rope, keep if i == len(layers) - 1 else None, **kw)
    return residual


def rope_table(config: LlamaConfig, length: int, dtype: torch.dtype, device: torch.device) -> Rope:
    """cos and sin [length, hd] of positions 0 .. length - 1."""
    rotary = LlamaRotaryEmbedding(config).to(device)
    positions = torch.arange(length, device=device)[None]
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
    return cos[0], sin[0]
