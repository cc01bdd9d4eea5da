"""Attention of training-time test (EAGLE-3, Li et al. 2025; HASS, Zhang et al. 2024), exact
and without big masks.

At step s a row attends to the step-0 keys up to itself and to *its own* keys of steps 1..s.
The first part is causal attention inside documents, by whatever the device has for it
(`kernel_for`); the second is one number per row and step; both softmaxes are merged by
their log-sum-exp, and the backward pass of the first part needs only the merged output and
log-sum-exp. With a sliding window (Beltagy et al. 2020) s fewer keys of step 0 are left to
a row at step s. The same in plain operations: tests/heads/test_ttt_attention.py.

Shape letters: B rows, T positions, n packed rows, H query heads, Hkv key heads, g = H /
Hkv, hd head size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "outrider_ttt"
BLOCK = 1 << 24  # scores that dense blocks hold at the same time
WIDEST = 256  # head size that flash attention of CUDA takes


@dataclass(frozen=True)
class PassLayout:
    """Where documents and rows of a training pass lie. What is a list or a number is known
    to the host: no device is asked for it.

    shape: (B, T) of step 0, B documents. cuts: [B + 1] int32, flat positions where they begin,
    and the end. rows: [n] int64 flat positions that later steps go on with, ascending; None:
    all. bounds: number of the first row of each document, and n. reaches: tokens of each
    document up to its last row. window: how many keys of step 0 a row sees at most, up to its
    own place; 0 = all."""

    shape: tuple[int, int]
    cuts: Tensor
    rows: Tensor | None
    bounds: list[int]
    reaches: list[int]
    window: int = 0

    @classmethod
    def of(cls, shape: tuple[int, int], rows: Tensor) -> PassLayout:
        """Return the layout for tensors on the CPU."""
        edges = torch.arange(shape[0] + 1) * shape[1]
        bounds = torch.searchsorted(rows, edges)
        last = torch.cat([rows.new_full((1,), -1), rows])[bounds[1:]]
        reaches = (last + 1 - edges[:-1]).clamp(min=0).tolist()
        return cls(shape, edges.int(), rows, bounds.tolist(), reaches)

    def whole(self) -> PassLayout:
        """Return the same with all positions as rows, as step 0 has it."""
        count, length = self.shape
        bounds = [b * length for b in range(count + 1)]
        return replace(self, rows=None, bounds=bounds, reaches=[length] * count)

    def seen(self, window: int) -> PassLayout:
        """Return the same with that window; one that no document fills is none."""
        return replace(self, window=window if 0 < window < self.shape[1] else 0)

    def spread(self, x: Tensor) -> Tensor:
        """[n, ..] -> [B * T, ..], zeros where no row is."""
        if self.rows is None:
            return x
        total = self.shape[0] * self.shape[1]
        return x.new_zeros(total, *x.shape[1:]).index_copy_(0, self.rows, x)

    def pack(self, x: Tensor) -> Tensor:
        """[B * T, ..] -> [n, ..]."""
        return x if self.rows is None else x.index_select(0, self.rows)


class Memory:
    """Keys and values of one training pass up to `step`. window: positions that a row sees at
    most, more than there are steps; 0 = all."""

    def __init__(self, layout: PassLayout, window: int = 0) -> None:
        self.given, self.window = layout, window
        self.layout, self.step = layout, 0
        self.first: dict[int, tuple[Tensor, Tensor]] = {}  # of a layer: [B, Hkv, T, hd] each
        # of a layer and later steps: keys and values interleaved, [n, Hkv, hd]
        self.later: dict[int, list[Tensor]] = {}

    def at(self, step: int) -> Memory:
        """Return a memory for `step` that adds nothing to this one: what a step finds can
        then be told to it again."""
        found = copy.copy(self)
        found.step, found.first = step, dict(self.first)
        found.layout = self.given if step else self.given.whole()
        if self.window:
            found.layout = found.layout.seen(self.window - step)
        found.later = {layer: list(own) for layer, own in self.later.items()}
        return found


def ttt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    memory: Memory | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Step 0: query [B, H, T, hd] -> [B, T, H, hd];
    later: [1, H, n, hd] -> [1, n, H, hd]. Rows are right-padded, so step 0 is causal
    without a mask."""
    assert memory is not None, "ttt_attention needs the memory of its training pass"
    layer, rows = cast(int, module.layer_idx), query.transpose(1, 2)
    own: list[Tensor] = []
    if memory.step:
        own = memory.later.setdefault(layer, [])
        own += [key[0].transpose(0, 1), value[0].transpose(0, 1)]
    else:
        memory.first[layer] = (key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(rows.flatten(0, 1), memory.layout, scale, memory.first[layer], own)
    return out.unflatten(0, rows.shape[:2]), None


ALL_ATTENTION_FUNCTIONS.register(NAME, ttt_attention)


def attend(
    query: Tensor, layout: PassLayout, scale: float, first: tuple[Tensor, Tensor], own: list[Tensor]
) -> Tensor:
    """query: [n, H, hd] of the layout's rows. first: keys and values of step 0, [B, Hkv, T,
    hd]. own: the rows' later keys and values interleaved, [n, Hkv, hd] -> [n, H, hd]."""
    with torch.autocast(query.device.type, enabled=False):  # scores are float32 where they are
        return _Attend.apply(query, layout, scale, *first, *own)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        layout: PassLayout,
        scale: float,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        kernel, wide = kernel_for(query), torch.promote_types(query.dtype, torch.float32)
        out, total, kept = kernel.forward(query, key, value, layout, scale)
        attns: list[Tensor] = []
        if own:
            grouped = _grouped(query, own[0])
            found = ((grouped * k[:, :, None]).sum(-1, dtype=wide).flatten(1) for k in own[0::2])
            parts = [total, *(score.mul_(scale) for score in found)]
            total = torch.logsumexp(torch.stack(parts), 0)  # [n, H]
            out = out * (parts[0] - total).exp()[..., None].to(query.dtype)
            attns = [(p - total).exp_().to(query.dtype) for p in parts[1:]]
            into = _grouped(out, own[0])
            for attn, v in zip(attns, own[1::2], strict=True):
                into.addcmul_(_grouped(attn, own[0])[..., None], v[:, :, None])
        ctx.layout, ctx.scale, ctx.kernel, ctx.steps = layout, scale, kernel, len(attns)
        ctx.save_for_backward(query, key, value, out, total, *attns, *own, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total, *rest = ctx.saved_tensors
        steps, grad = ctx.steps, grads[0].contiguous()
        attns, own, kept = rest[:steps], rest[steps : 3 * steps], rest[3 * steps :]
        delta = (grad * out).sum(-1, dtype=total.dtype)
        merged = Merged(query, key, value, grad, out, total, delta, *kept)
        into_query, *into_pair = ctx.kernel.backward(merged, ctx.layout, ctx.scale)
        found: list[Tensor] = []
        for attn, k, v in zip(attns, own[0::2], own[1::2], strict=True):
            q, g, p = (_grouped(t, k) for t in (query, grad, attn))
            pull = (g * v[:, :, None]).sum(-1, dtype=total.dtype)
            score = p * (pull - _grouped(delta, k)).mul_(ctx.scale).to(p.dtype)
            _grouped(into_query, k).addcmul_(score[..., None], k[:, :, None])
            found += [(score[..., None] * q).sum(2), (p[..., None] * g).sum(2)]
        return (into_query, None, None, *into_pair, *found)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[n, H, ..] -> [n, Hkv, g, ..], a view; Hkv: of `like`."""
    return x.unflatten(1, (like.shape[1], -1))


# -- causal attention inside documents


class Merged(NamedTuple):
    """What the backward pass of the causal part starts from: query, grad, merged out [n, H,
    hd]; key, value [B, Hkv, T, hd]; merged log-sum-exp and delta = sum(grad * out) [n, H];
    the random state that a kernel wants to have back."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    seed: Tensor | None = None
    offset: Tensor | None = None


Found = tuple[Tensor, Tensor, tuple[Tensor, ...]]  # out [n, H, hd], log-sum-exp [n, H], to keep
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key, value


class Kernel(NamedTuple):
    """forward: (query, key, value, layout, scale) -> Found. backward: dS = P (dO V' -
    delta), P = exp(S - lse), put through to query, key and value."""

    forward: Callable[[Tensor, Tensor, Tensor, PassLayout, float], Found]
    backward: Callable[[Merged, PassLayout, float], Gradients]


def kernel_for(query: Tensor) -> Kernel:
    """Return what computes the causal part for such tensors: flash attention of CUDA; the
    CPU's flash kernel forward, whose own backward is slower than the dense blocks'; else
    dense blocks."""
    if query.device.type == "cpu":
        return CPU
    short = query.dtype in (torch.float16, torch.bfloat16)
    fits = short and query.shape[-1] <= WIDEST and query.shape[-1] % 8 == 0
    return FLASH if fits and query.is_cuda and _has_flash(query.device) else BLOCKS


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Return whether this GPU runs flash attention."""
    modern = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    return modern and torch.backends.cuda.is_flash_attention_available()


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: PassLayout, scale: float
) -> Found:
    if layout.window:  # the kernel would compute all scores and hide them by a mask
        return _block_forward(query, key, value, layout, scale)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    padded = layout.spread(query).unflatten(0, layout.shape).transpose(1, 2)  # [B, H, T, hd]
    pair = [t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value)]
    out, lse = flash(padded, *pair, 0.0, True, scale=scale)
    return *(layout.pack(t.transpose(1, 2).flatten(0, 1)) for t in (out, lse)), ()  # type: ignore[return-value]


class _Block(NamedTuple):
    """Some heads of the rows of a document. near: of [n, H, ..]. far: of [B, Hkv, T, ..], the
    keys that any of them sees. hidden: [m, keys] bool, those that a row does not see."""

    near: tuple[slice, slice]
    far: tuple[int, slice, slice]
    hidden: Tensor


def _blocks(layout: PassLayout, heads: int, kv: int) -> Iterator[_Block]:
    length = layout.shape[1]
    groups, slots = heads // kv, torch.arange(length, device=layout.cuts.device)
    for b, ((low, high), reach) in enumerate(
        zip(pairwise(layout.bounds), layout.reaches, strict=True)
    ):
        if low == high:
            continue
        at = slots[:reach] if layout.rows is None else layout.rows[low:high] - b * length
        hidden = slots[:reach] > at[:, None]
        if layout.window:
            hidden |= slots[:reach] <= at[:, None] - layout.window
        some = max(1, BLOCK // (hidden.numel() * groups))
        for h in range(0, kv, some):
            last, keys = min(h + some, kv), slice(reach)
            near = slice(low, high), slice(h * groups, last * groups)
            yield _Block(near, (b, slice(h, last), keys), hidden)


def _block_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: PassLayout, scale: float
) -> Found:
    wide, heads = torch.promote_types(query.dtype, torch.float32), query.shape[1]
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=wide)
    for near, far, hidden in _blocks(layout, heads, key.shape[1]):
        k, v = key[far], value[far]
        scores = _by_key_head(query[near] * scale, k).to(wide) @ k.mT.to(wide)
        scores = scores.unflatten(1, (-1, len(hidden)))
        scores = scores.masked_fill_(hidden, -torch.inf).flatten(1, 2)
        total = scores.logsumexp(-1, keepdim=True)
        attn = scores.sub_(total).exp_().to(v.dtype)
        out[near], lse[near] = _by_row(attn @ v, len(hidden)), _by_row(total, len(hidden))[..., 0]
    return out, lse, ()


def _block_backward(merged: Merged, layout: PassLayout, scale: float) -> Gradients:
    query, key, value, grad = merged[:4]
    into_query = torch.empty_like(query)
    into_key, into_value = torch.zeros_like(key), torch.zeros_like(value)
    for near, far, hidden in _blocks(layout, query.shape[1], key.shape[1]):
        k, v, rows = key[far], value[far], len(hidden)
        q, g = _by_key_head(query[near] * scale, k), _by_key_head(grad[near], k)
        lse, delta = (_by_key_head(t[near][..., None], k) for t in (merged.lse, merged.delta))
        attn = torch.sub(q @ k.mT, lse).exp_().unflatten(1, (-1, rows))
        attn = attn.masked_fill_(hidden, 0.0).flatten(1, 2).to(q.dtype)
        into_value[far] += attn.mT @ g
        score = (g @ v.mT).sub_(delta).mul_(attn)
        into_query[near] = _by_row((score @ k).mul_(scale), rows)
        into_key[far] += score.mT @ q
    return into_query, into_key, into_value


def _by_key_head(x: Tensor, like: Tensor) -> Tensor:
    """[m, h * g, c] -> [h, g * m, c] for h heads of `like` [h, .., ..]."""
    return x.unflatten(1, (like.shape[0], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """[h, g * m, c] -> [m, h * g, c]."""
    return x.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).flatten(1, 2)


def _side_by_side(x: Tensor) -> Tensor:
    """[B, h, T, hd] -> [B * T, h, hd]."""
    return x.transpose(1, 2).flatten(0, 1)


def _flash_settings(layout: PassLayout, scale: float) -> dict[str, Any]:
    """Return the named arguments of both passes of flash attention; of a window the
    positions before and behind a row's own."""
    window = {"window_size_left": layout.window - 1, "window_size_right": 0}
    return {"scale": scale, **(window if layout.window else {})}


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: PassLayout, scale: float
) -> Found:
    length = layout.shape[1]
    documents = layout.cuts, layout.cuts, length, length, 0.0, True
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        layout.spread(query),
        _side_by_side(key),
        _side_by_side(value),
        *documents,
        False,
        **_flash_settings(layout, scale),
    )
    return layout.pack(out), layout.pack(lse.T), (seed, offset)


def _flash_backward(merged: Merged, layout: PassLayout, scale: float) -> Gradients:
    grad, query, out, lse = map(layout.spread, (merged.grad, merged.query, merged.out, merged.lse))
    length = layout.shape[1]
    documents = layout.cuts, layout.cuts, length, length, 0.0, True
    into_query, *into = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        _side_by_side(merged.key),
        _side_by_side(merged.value),
        out,
        lse.T.contiguous(),
        *documents,
        merged.seed,
        merged.offset,
        **_flash_settings(layout, scale),
    )
    pair = (t.unflatten(0, layout.shape).transpose(1, 2) for t in into)
    return layout.pack(into_query), *pair  # type: ignore[return-value]


CPU = Kernel(_cpu_forward, _block_backward)
BLOCKS = Kernel(_block_forward, _block_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
