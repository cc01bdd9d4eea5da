"""The decoder layer of EAGLE drafters: transformers' own Llama classes, shaped after the
target, with wide projections.

Serving engines run a Llama-style layer whatever the target is, so that is what is trained:
head count, head size, grouping, rotary base and scaling and norm epsilon are the target's, the
MLP's width and activation keys of the head (heads/layers/shape.py); there is no bias. Weights are
float32; every module computes in the dtype of its input.

Shape letters: B rows, T positions, n rows of a packed pass, D width, H query heads, hd head
size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
)

from outrider.heads.layers.modules import RMSNorm, owned, take
from outrider.heads.layers.rope import Rope


class DraftLayer(nn.Module):
    """One layer. wide: the attention reads 2 D (normed embedding beside normed feature:
    EAGLE-3's first layer).

    norm: the input norm of an ordinary layer; absent in EAGLE-1's first layer, and a wide
        layer is given its input.
    """

    def __init__(self, config: LlamaConfig, index: int, wide: bool, norm: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, index)
        if wide:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(
                    self.self_attn,
                    name,
                    nn.Linear(2 * width, getattr(self.self_attn, name).out_features, bias=False),
                )
        owned(self.self_attn)
        self.mlp = owned(LlamaMLP(config))
        self.input_layernorm = RMSNorm(width, eps) if norm else None
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(
        self, residual: Tensor, x: Tensor, rope: Rope, keep: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """residual [.., D], x [.., D or 2 D]; keep: flat row numbers [n] that go on after the
        attention: [n, D].
        """
        attended = self.self_attn(hidden_states=x, position_embeddings=rope, **kwargs)[0]
        if keep is not None:
            residual, attended = (
                take(t.reshape(-1, t.shape[-1]), keep) for t in (residual, attended)
            )
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))
