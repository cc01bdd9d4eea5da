"""Llama's decoder layer as one function, for decoding with packed weights: the same operations
on the same numbers, without the calls in between.

For a single token most of the time beside the matrix products goes into Python: some 5,000 calls
a pass of 30 layers. Queries and keys are rotated together (they stand side by side in one
product), norms are one call, and no module is called. Only layers of transformers' own Llama
class whose parts are stock and packed together are replaced; all others run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    eager_attention_forward,
)
from transformers.utils import output_capturing

from outrider.decode.models.packed import PackedLinear, Product

Forward = Callable[..., Tensor]


def joint(parts: list[Any]) -> Product | None:
    """The product that these layers share whole and in this order; None where there is none."""
    if not all(isinstance(part, PackedLinear) for part in parts):
        return None
    product: Product = parts[0].product
    same = all(part.product is product and part.number == n for n, part in enumerate(parts))
    return product if same and len(product.sizes) == len(parts) else None


def _plain(module: nn.Module) -> bool:
    """Whether nothing hangs on the parts of `module`: a hook would not be called. transformers'
    own, which only collect what is asked for, may hang there: attention maps are not."""
    for part in module.modules():
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        strange = [hook for hook in hooks if hook.__module__ != output_capturing.__name__]
        if part is not module and (strange or "forward" in vars(part)):
            return False
    return "forward" not in vars(module)


def lean(layer: nn.Module) -> Forward | None:
    """`layer.forward` as one function; None for another kind of layer."""
    if type(layer) is not LlamaDecoderLayer or not _plain(layer):
        return None
    attn, mlp = layer.self_attn, layer.mlp
    before, between = layer.input_layernorm, layer.post_attention_layernorm
    stock = type(attn) is LlamaAttention and type(mlp) is LlamaMLP
    stock &= type(mlp.act_fn) is SiLUActivation
    stock &= type(before) is LlamaRMSNorm and type(between) is LlamaRMSNorm
    if not stock or attn.training:
        return None
    qkv, up = joint([attn.q_proj, attn.k_proj, attn.v_proj]), joint([mlp.gate_proj, mlp.up_proj])
    out, down = joint([attn.o_proj]), joint([mlp.down_proj])
    if qkv is None or up is None or out is None or down is None:
        return None
    size = attn.head_dim
    heads, pairs = qkv.sizes[0] // size, qkv.sizes[0] // size + qkv.sizes[1] // size
    half, wide = size // 2, [qkv.sizes[0] + qkv.sizes[1], qkv.sizes[2]]
    scale, index, config = attn.scaling, attn.layer_idx, attn.config
    products = (qkv, up, out, down)

    def forward(
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        qkv, up, out, down = products
        rows, new, width = hidden_states.shape
        x = _norm(before, hidden_states)
        both, value = qkv(x).split(wide, -1)
        both = both.view(rows, new, pairs, size).transpose(1, 2)
        value = value.view(rows, new, -1, size).transpose(1, 2)
        cos, sin = position_embeddings
        turned = torch.cat((-both[..., half:], both[..., :half]), -1)
        both = both * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
        query, key = both[:, :heads], both[:, heads:]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, index)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, eager_attention_forward
        )
        kwargs |= {"position_ids": position_ids, "use_cache": use_cache}
        seen = attend(
            attn, query, key, value, attention_mask, dropout=0.0, scaling=scale, **kwargs
        )[0]
        hidden_states = hidden_states + out(seen.reshape(rows, new, -1))
        gate, more = up(_norm(between, hidden_states)).chunk(2, -1)
        return hidden_states + down(silu(gate) * more)

    return forward


def _norm(norm: Any, x: Tensor) -> Tensor:
    """As LlamaRMSNorm: the same roundings."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (wide * scale).to(x.dtype)  # type: ignore[no-any-return]


def shorten(model: nn.Module) -> list[nn.Module]:
    """Give every layer of `model` that has one its short forward; those layers. `lengthen`
    takes it back."""
    found = []
    for layer in model.modules():
        if (short := lean(layer)) is not None:
            layer.forward = short
            found.append(layer)
    return found


def lengthen(layers: list[nn.Module]) -> None:
    """The inverse of `shorten`."""
    for layer in layers:
        vars(layer).pop("forward", None)
