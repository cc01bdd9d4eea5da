"""EAGLE-3's draft layer as one function of tensors, as the target's layers are
(decode/models/flat.py), compiled where that pays (decode/models/compiled.py): the same bits as the
modules', without the calls in between. `steps` chooses once, when a drafter is made.

    python -m outrider.heads.eagle.flat SHAPE OUT WORK

compiles, in a process of its own.

Shape letters: B rows, W tokens read together, n of them that go on, S slots attended, D width, Hkv
key/value heads, hd head size.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from outrider.conf import bound
from outrider.conf.errors import first_line
from outrider.decode.models import compiled
from outrider.decode.models.compiled import PARTS, GraphProduct, LayerShape, Run
from outrider.decode.models.flat import FlatLayer, FlatPass, group, plain
from outrider.decode.target import Target
from outrider.heads.eagle.cache import DraftCache
from outrider.heads.eagle.layer import DraftLayer
from outrider.heads.eagle.modules import Linear, RMSNorm
from outrider.heads.eagle.net import Eagle3Net, EagleNet
from outrider.heads.eagle.rope import Rope

LAYERS = 3  # of a target: what compiling saves them, it saves a level


@dataclass(frozen=True)
class DraftPass(FlatPass):
    """The one layer, `before` the norm of the feature; norm: the final one. first: weight [D] of
    the embedding's norm. normed: whether the layer adds to the normed feature. embed and rotary
    are not called."""

    first: Tensor
    normed: bool

    def level(
        self,
        read: tuple[Tensor, Tensor],
        rope: Rope,
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """h and normed h [B, W, D], or [n, D] of the flat places keep [n], of the embeddings and
        features `read` [B, W, D]. rope: [B or 1, W, hd]. cached: keys and values [B, Hkv, S, hd],
        into which those of the new tokens are written at slots [B or 1, W]. mask: bool, as
        tree_attention takes it."""
        (e, g), layer, half = read, self.layers[0], self.heads[2] // 2
        cos, sin = (each.unsqueeze(1) for each in rope)
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)  # the sign of a rotated half
        feature = self._norm(g, layer.before)
        x = torch.cat([self._norm(e, self.first), feature], -1)
        base = feature if self.normed else g
        added = self.attended(layer, x, (cos, sin), cached, slots, mask)
        if keep is not None:
            base, added = (t.flatten(0, 1).index_select(0, keep) for t in (base, added))
        h = self.fed(layer, added.add_(base))
        return h, self._norm(h, self.norm)

    def write(
        self, cached: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """See FlatPass; as DraftCache.update."""
        for buffer, new in zip(cached, (key, value), strict=True):
            found = torch.nan_to_num(new, 0.0, 0.0, 0.0)
            if slots.shape[0] == 1:
                buffer.index_copy_(2, slots[0], found)
            else:
                rows, heads = (torch.arange(n, device=new.device) for n in new.shape[:2])
                place = rows[:, None, None], heads[:, None], slots[:, None]
                buffer.index_put_(place, found)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """As heads.eagle.modules.RMSNorm, which rounds once."""
        return F.rms_norm(x, weight.shape, weight, self.eps)


@dataclass(frozen=True)
class CompiledDraft(DraftPass):
    """A DraftPass that runs from a library. A prompt from its beginning runs uncompiled."""

    run: Run

    def level(
        self,
        read: tuple[Tensor, Tensor],
        rope: Rope,
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """See DraftPass."""
        e, g = read
        rows, new, width = e.shape
        if not e.numel() or (mask is None and new > 1):
            return super().level(read, rope, cached, slots, mask, keep)
        if mask is None:
            mask = torch.ones(rows, 1, 1, cached[0].shape[2], dtype=torch.bool, device=e.device)
        flat = torch.arange(rows * new, device=e.device) if keep is None else keep
        shared = (*rope, slots, mask)
        cos, sin, slots, mask = (t.expand(rows, *t.shape[1:]).contiguous() for t in shared)
        given = [e.contiguous(), g.contiguous(), cos, sin, *cached, slots, mask, flat]
        h, normed = self.run(given)
        if keep is None:
            return h.view(rows, new, width), normed.view(rows, new, width)
        return h, normed


class FlatSteps:
    """An Eagle3Net as drafting calls it, its layer one function. last: h of the newest pass, and
    what the LM head reads of it."""

    def __init__(self, net: EagleNet, flat: DraftPass) -> None:
        self.net, self.flat = net, flat
        self.last: tuple[Tensor | None, Tensor | None] = None, None

    def advance(
        self,
        e: Tensor,
        g: Tensor,
        rope: Rope,
        keep: Tensor | None = None,
        *,
        attention_mask: Tensor | None,
        past_key_values: DraftCache,
    ) -> Tensor:
        """See EagleNet."""
        cache = past_key_values
        seen, start = slice(cache.low, cache.reach), cache.start - cache.low
        keys, values = (t[0, cache.rows, :, seen] for t in (cache.keys, cache.values))
        slots = cache.line[None, start : start + e.shape[1]]
        if cache.slots is not None:
            slots = cache.slots[1] - cache.low if cache.low else cache.slots[1]
        h, normed = self.flat.level((e, g), rope, (keys, values), slots, attention_mask, keep)
        self.last = h, normed
        return h

    def read(self, h: Tensor) -> Tensor:
        """See EagleNet."""
        known, normed = self.last
        return normed if normed is not None and h is known else self.net.read(h)


def steps(net: EagleNet, target: Target, levels: int) -> EagleNet | FlatSteps:
    """What runs the layers `net` of a drafter of so many levels: one function where it gives the
    bits of the modules, compiled where that gives them too; else they themselves."""
    on_cpu = target.packs_weights and target.device.type == "cpu"
    flat = draft_pass(net) if on_cpu else None
    if flat is None:
        return net
    wanted = passes(net, net, target)
    if not same(passes(FlatSteps(net, flat), net, target), wanted):
        return net
    # The committed tokens, and all levels but the first.
    fast = (
        compiled_draft(flat, LAYERS * levels * target.expected_passes) if target.compiles else None
    )
    try:
        if fast is not None and same(passes(FlatSteps(net, fast), net, target), wanted):
            return FlatSteps(net, fast)
        why = "a compiled draft layer rounds otherwise here" if fast else ""
    except RuntimeError as e:
        why = first_line(e)
    if why:
        compiled.refuse(why)
    return FlatSteps(net, flat)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether every bit is equal."""
    return all(map(torch.equal, found, wanted))


@torch.inference_mode()
def passes(steps: EagleNet | FlatSteps, net: EagleNet, target: Target) -> list[Tensor]:
    """What it gives of a prompt and committed tokens, a level of a chain and one of a tree, of one
    row and of two of equal and of other lengths, and the keys and values that it leaves."""
    dtype, device, found = target.dtype, target.device, []
    rng, table = torch.Generator().manual_seed(0), net.rope(20, dtype, device)

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng).to(device, dtype)

    for ends in ([0], [7], [7, 7], [7, 4]):
        rows = len(ends)
        cache = DraftCache(net, rows, 20, dtype, device)
        for buffer in (cache.keys, cache.values):
            buffer.copy_(some(*buffer.shape))
        for ahead, new in ((0, 5), (5, 1), (6, 3)):
            places = cache.aim(slice(0, rows), ends, ahead, new)
            mask = cache.back(places)[:, None] if cache.masked(places) else None
            if mask is not None and new == 3:  # nodes of one level, which do not see each other
                hidden = ~torch.eye(3, dtype=torch.bool, device=device)
                behind = cache.line[: cache.reach] - cache.ends - ahead
                near = (behind >= 0) & (behind < 3)
                apart = hidden[:, behind.clamp(0, 2)].transpose(0, 1) & near[:, None]
                mask = mask & ~apart[:, None]
            keep = torch.arange(rows, device=device) * new if ahead == 0 else None
            e, g, rope = some(rows, new, net.width), some(rows, new, net.width), table[0][places]
            turn = rope, table[1][places]
            h = steps.advance(e, g, turn, keep, attention_mask=mask, past_key_values=cache)
            found += [h.clone(), steps.read(h).clone()]
        found += [cache.keys, cache.values]
    return found


def draft_pass(net: EagleNet) -> DraftPass | None:
    """The flat pass of `net`, None for another kind of network or one that somebody watches."""
    if type(net) is not Eagle3Net or len(net.layers) != 1 or not plain(net):
        return None
    layer: Any = net.layers[0]
    attn, mlp, between = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    norms = net.embed_norm, net.hidden_norm, between, net.norm
    kinds = type(layer), type(attn), type(mlp), type(mlp.act_fn), *map(type, norms)
    if kinds != (DraftLayer, LlamaAttention, LlamaMLP, SiLUActivation, *[RMSNorm] * 4):
        return None
    if net.mask_embed is not None or len({norm.variance_epsilon for norm in norms}) > 1:
        return None
    qkv = group(attn.q_proj, attn.k_proj, attn.v_proj, kind=Linear)
    out, up = group(attn.o_proj, kind=Linear), group(mlp.gate_proj, mlp.up_proj, kind=Linear)
    down = group(mlp.down_proj, kind=Linear)
    if qkv is None or out is None or up is None or down is None:
        return None
    found = FlatLayer(attn, net.hidden_norm.weight, qkv, out, between.weight, up, down)
    heads = attn.config.num_attention_heads, attn.config.num_key_value_heads, attn.head_dim
    return DraftPass(
        (found,),
        net.norm.weight,
        between.variance_epsilon,
        attn.scaling,
        heads,
        net,
        net,
        net.embed_norm.weight,
        net.norm_before_residual,
    )


@dataclass(frozen=True)
class DraftShape(LayerShape):
    """normed: see DraftPass."""

    module: ClassVar[str] = __name__
    normed: bool = False


def compiled_draft(flat: DraftPass, layers_to_come: int) -> CompiledDraft | None:
    """`flat` from a library, as decode.models.compiled.compiled_pass."""
    known = compiled.shape_of(flat)
    if known is None:
        return None
    shape = DraftShape(**vars(known), normed=flat.normed)
    try:
        path = compiled.library(shape, layers_to_come >= compiled.PAYS)
        if path is None:
            return None
        more = {"first": flat.first, "last": flat.norm}
        run = compiled.loaded(path, compiled.weights(flat.layers[0]) | more)
    except compiled.FAILURES as e:
        compiled.refuse(first_line(e))
        return None
    return CompiledDraft(**{one.name: getattr(flat, one.name) for one in fields(flat)}, run=run)


@dataclass(frozen=True)
class _Traced(DraftPass):
    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (compiled.unit(x, self.eps) * weight.float()).to(x.dtype)


class _Level(nn.Module):
    """What is compiled: `DraftPass.level` over weights of its own."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        for norm in ("first", "before", "between", "last"):
            self.register_buffer(norm, torch.ones(shape.width, dtype=torch.bfloat16))
        for part, product in zip(PARTS, shape.products, strict=True):
            self.add_module(part, GraphProduct(*product))

    def forward(
        self,
        read: tuple[Tensor, Tensor],
        rope: Rope,
        cached: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor,
        keep: Tensor,
    ) -> tuple[Tensor, Tensor]:
        own, shape = cast(Any, self), self.shape
        one = FlatLayer(self, own.before, own.qkv, own.out, own.between, own.up, own.down)
        heads, kv_heads, size = shape.heads
        counts = heads, kv_heads, size
        run = _Traced(
            (one,), own.last, shape.eps, shape.scale, counts, self, self, own.first, shape.normed
        )
        away = torch.full((), -torch.inf, dtype=torch.bfloat16)
        mask = torch.where(mask, torch.zeros_like(away), away)
        tiled = mask.repeat(1, 1, heads // kv_heads, 1)
        return run.level(read, rope, cached, slots, tiled, keep)


@torch.no_grad()
def build(shape: DraftShape, out: Path) -> None:
    """Compile a level of `shape` into the library `out`."""
    _, kv_heads, size = shape.heads
    # Sizes that no other size equals: the compiler would take the two for one.
    rows, new, seen, slots, kept = 5, 7, 211, 1021, 23

    def some(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.bfloat16)

    e, g = (some(rows, new, shape.width) for _ in range(2))
    cos, sin = (some(rows, new, size) for _ in range(2))
    keys, values = (some(rows, kv_heads, slots, size)[:, :, :seen] for _ in range(2))
    places = torch.arange(rows * new).view(rows, new)
    mask = torch.ones(rows, 1, new, seen, dtype=torch.bool)
    inputs = (e, g), (cos, sin), (keys, values), places, mask, torch.arange(kept)
    wide, deep = (0, 1), (0, 2)
    varying = (wide, wide), (wide, wide), (deep, deep), wide, (0, 2, 3), (0,)
    compiled.export(_Level(shape), inputs, varying, out)


if __name__ == "__main__":
    bound.end_with_parent(Path(sys.argv[3]))
    build(DraftShape(**json.loads(sys.argv[1])), Path(sys.argv[2]))
