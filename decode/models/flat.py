"""All layers of a Llama as one function of tensors: the same operations on the same numbers as
transformers' modules, without the calls in between.

For a single token most of the time beside the matrix products goes into Python: some 5,000 calls
a pass of 30 layers. Here no module is called between the embeddings and the final norm, queries
and keys are rotated together, layers that read one tensor are one product where they are packed,
and norms are one call. Only models of transformers' own Llama and Qwen2 classes whose parts are
stock are run so; whether every bit stays what it was is asked of the model itself
(decode/packing.py).

Shape letters: B rows, T new tokens, S slots attended, D width, H query heads, Hkv key/value
heads, hd head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.utils import output_capturing

from outrider.decode.attention import tree_attention
from outrider.decode.models.packed import PackedLinear, Product


@dataclass(frozen=True)
class Family:
    """The classes of a model whose layers compute what `FlatPass` does."""

    model: type
    body: type
    layer: type
    attention: type
    mlp: type
    norm: type


FAMILIES = (
    Family(
        llama.LlamaForCausalLM,
        llama.LlamaModel,
        llama.LlamaDecoderLayer,
        llama.LlamaAttention,
        llama.LlamaMLP,
        llama.LlamaRMSNorm,
    ),
    Family(
        qwen2.Qwen2ForCausalLM,
        qwen2.Qwen2Model,
        qwen2.Qwen2DecoderLayer,
        qwen2.Qwen2Attention,
        qwen2.Qwen2MLP,
        qwen2.Qwen2RMSNorm,
    ),
)


@dataclass(frozen=True)
class Apart:
    """Linear layers of one input that are not packed, called as a Product is. layers: weight and
    bias of each."""

    layers: list[tuple[Tensor, Tensor | None]]

    def __call__(self, x: Tensor) -> Tensor:
        """[.., I] -> [.., sum of O]."""
        return torch.cat(self.split(x), -1) if len(self.layers) > 1 else self.split(x)[0]

    def split(self, x: Tensor) -> list[Tensor]:
        """[.., I] -> [.., O] of each."""
        return [linear(x, weight, bias) for weight, bias in self.layers]


Group = Product | Apart


@dataclass(frozen=True)
class FlatLayer:
    """before, between: weights [D] of the norms. up: gate and up."""

    attn: nn.Module
    before: Tensor
    qkv: Group
    out: Group
    between: Tensor
    up: Group
    down: Group


@dataclass(frozen=True)
class FlatPass:
    """The layers with the final norm. embed, rotary: the model's own modules, which are called
    once a pass. heads: H, Hkv, hd."""

    layers: tuple[FlatLayer, ...]
    norm: Tensor
    eps: float
    scale: float
    heads: tuple[int, int, int]
    embed: nn.Module
    rotary: nn.Module

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cached: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        mask: Tensor | None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [B, T, D] behind the final norm of tokens ids [B, T] int64 at positions
        [B or 1, T], and those of `taps` (see decode/scorer.py).

        cached: keys and values [B, Hkv, S, hd] of every layer, into which those of the new tokens
        are written at slots [T] int64. mask: additive, as tree_attention takes it.
        """
        x = self.embed(ids)
        cos, sin = self.rotary(x, position_ids=positions)
        return self.stack(x, cos, sin, cached, slots, mask, taps)

    def stack(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cached: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        mask: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """As __call__, of embeddings x [B, T, D] and rotations cos, sin [B or 1, T, hd]; reads no
        value of a tensor on the host."""
        turn, seen = self.turn(cos, sin), {}
        for number, pair in zip(range(len(self.layers)), cached, strict=True):
            if number in taps:
                seen[number] = x
            x = self.layer(number, x, turn, pair, slots, mask)
        x = seen[len(self.layers)] = self._norm(x, self.norm)
        return x, [seen[tap] for tap in taps]

    def turn(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotations [B or 1, T, hd] as layers take them: for all heads, the first half of sin
        negated, which is the sign of a rotated half."""
        half = self.heads[2] // 2
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)

    def layer(
        self,
        number: int,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Hidden states [B, T, D] behind one layer of those before it. turn: cos and sin
        [B or 1, 1, T, hd], the first half of sin negated."""
        layer = self.layers[number]
        mixed = self.attended(layer, self._norm(x, layer.before), turn, cached, slots, mask)
        return self.fed(layer, mixed.add_(x))

    def attended(
        self,
        layer: FlatLayer,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """[B, T, D] that the attention of `layer` adds, of what it reads; else as `layer`."""
        return layer.out(self.mixed(layer.attn, layer.qkv(x), turn, cached, slots, mask))

    def mixed(
        self,
        attn: nn.Module,
        qkv: Tensor,
        turn: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """[B, T, H * hd] that attention makes of queries, keys and values [B, T, (H + 2 Hkv) *
        hd]; else as `layer`."""
        (cos, sin), (rows, new) = turn, qkv.shape[:2]
        query_heads, kv_heads, size = self.heads
        half, turns = size // 2, query_heads + kv_heads
        wide = [turns * size, kv_heads * size]
        both, value = qkv.split(wide, -1)
        both = both.view(rows, new, turns, size).transpose(1, 2)
        turned = torch.cat((both[..., half:], both[..., :half]), -1)
        both = (both * cos).add_(turned.mul_(sin))
        value = value.view(rows, new, kv_heads, size).transpose(1, 2)
        self.write(cached, slots, both[:, query_heads:], value)
        query = both[:, :query_heads]
        mixed = tree_attention(attn, query, *cached, mask, scaling=self.scale)[0]
        return mixed.view(rows, new, query_heads * size)

    def write(
        self, cached: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Keep the new keys and values [B, Hkv, T, hd] at their slots."""
        for buffer, new in zip(cached, (key, value), strict=True):
            buffer.index_copy_(2, slots, new)

    def fed(self, layer: FlatLayer, x: Tensor) -> Tensor:
        """Hidden states [.., D] behind the MLP of `layer`, of those behind its attention."""
        gate, more = layer.up.split(self._norm(x, layer.between))
        return layer.down(silu(gate).mul_(more)).add_(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """As LlamaRMSNorm: without a weight torch rounds once, as that does before it scales."""
        return torch.rms_norm(x, weight.shape, None, self.eps).mul_(weight)


def flat_pass(model: Any) -> FlatPass | None:
    """The flat pass of `model`, None for another kind of model or one that somebody watches."""
    family = next((one for one in FAMILIES if type(model) is one.model), None)
    if family is None or type(model.model) is not family.body or not plain(model):
        return None
    body: Any = model.model
    if (type(body.embed_tokens), type(body.norm)) != (nn.Embedding, family.norm):
        return None
    layers = [_layer(layer, family) for layer in body.layers]
    found = tuple(layer for layer in layers if layer is not None)
    norms: list[Any] = [part for part in body.modules() if type(part) is family.norm]
    eps = body.norm.variance_epsilon
    if len(found) < len(layers) or any(norm.variance_epsilon != eps for norm in norms):
        return None
    attn = body.layers[0].self_attn
    heads = attn.config.num_attention_heads, attn.config.num_key_value_heads, attn.head_dim
    embed, rotary = body.embed_tokens, body.rotary_emb
    return FlatPass(found, body.norm.weight, eps, attn.scaling, heads, embed, rotary)


def _layer(layer: Any, family: Family) -> FlatLayer | None:
    attn, mlp = layer.self_attn, layer.mlp
    norms = layer.input_layernorm, layer.post_attention_layernorm
    kinds = type(layer), type(attn), type(mlp), type(mlp.act_fn), *map(type, norms)
    stock = family.layer, family.attention, family.mlp, SiLUActivation, family.norm, family.norm
    if kinds != stock or getattr(attn, "sliding_window", None) is not None:
        return None
    qkv, out = group(attn.q_proj, attn.k_proj, attn.v_proj), group(attn.o_proj)
    up, down = group(mlp.gate_proj, mlp.up_proj), group(mlp.down_proj)
    if qkv is None or out is None or up is None or down is None:
        return None
    return FlatLayer(attn, norms[0].weight, qkv, out, norms[1].weight, up, down)


def group(*layers: Any, kind: type = nn.Linear) -> Group | None:
    """These layers, which read one tensor; None where one is of another class than `kind`, or is
    packed with others."""
    if all(type(layer) is PackedLinear for layer in layers):
        product: Product = layers[0].product
        whole = [(product, number) for number in range(len(product.sizes))]
        return product if [(layer.product, layer.number) for layer in layers] == whole else None
    if not all(type(layer) is kind for layer in layers):
        return None
    return Apart([(layer.weight, layer.bias) for layer in layers])


def plain(model: nn.Module) -> bool:
    """Whether nothing hangs on the parts of `model`: a hook would not be called. transformers'
    own, which only collect what is asked for, may hang there: they are not asked."""
    for part in model.modules():
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        strange = [hook for hook in hooks if hook.__module__ != output_capturing.__name__]
        if strange or "forward" in vars(part):
            return False
    return True
