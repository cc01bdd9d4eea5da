"""Attention for a few tree nodes against a long cache, without copying K/V for grouped
queries.

Registered with transformers under `NAME`; `Target` switches a model to it and the probe checks
it against the model's own attention. With a mask, transformers repeats K and V once per query
head of a group; here the G query heads that share a K/V head are folded into the query length
instead: [B, Hkv * G, T, hd] is read as [B, Hkv, G * T, hd].

Shape letters: B rows, H query heads, Hkv key/value heads, G = H / Hkv, T new tokens, S slots
of the cache, hd head size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "outrider_tree"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [B, H, T, hd], key/value [B, Hkv, S, hd] -> [B, T, H, hd].

    attention_mask: bool or additive [B or 1, 1, T or G * T, S], None for causal (T = 1:
    everything). A mask already tiled to G * T rows is used as it is: `Target` tiles it once
    per pass, not once per layer. Raises ValueError for what it does not know (softcaps, sinks,
    position biases): the probe then falls back to the model's own attention.
    """
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise ValueError("softcaps, attention sinks and position biases are not supported")
    # Without a mask a pass of several tokens is causal from slot 0, and one token sees all.
    if attention_mask is None and query.shape[2] > 1:
        return sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, heads, new, size = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * new, size)
        if attention_mask is not None and new > 1 and attention_mask.shape[2] == new:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(rows, heads, new, value.shape[-1]).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
