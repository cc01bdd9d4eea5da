"""The causal part of a drafter's attention in training (heads/layers/attention.py), by device.

What computes it is chosen by device (`kernel_for`): the CPU's flash kernel, whose
backward pass runs document by document on dense blocks, which the CPU's matrix unit likes
several times better than the kernel's own; flash attention of CUDA, forward and backward,
documents side by side; and for everything else those dense blocks alone. None of them holds
scores of all heads, and only the CPU's takes keys that are repeated for their group of queries.

Shape letters: B rows, T positions, n packed rows, H query heads, Hkv key heads, g = H / Hkv, hd
head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.heads.layers.layout import PassLayout, pack, side_by_side, spread, unpack

BLOCK = 1 << 24  # scores that dense blocks hold at the same time
LEAST_BAND = 128  # positions that rows of a block lie in where a window cuts documents
WIDEST = 256  # head size that flash attention of CUDA takes


class Known(NamedTuple):
    """What the backward pass of the causal part starts from: query, grad, merged out [n, H,
    hd]; key, value [B, Hkv or H, T, hd]; merged log-sum-exp and delta = sum(grad * out) [n, H];
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


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key, value
Found = tuple[Tensor, Tensor, tuple[Tensor, ...]]  # out, log-sum-exp, what backward wants


class Kernel(NamedTuple):
    """Causal attention inside documents. forward: (query, (key, value), layout, rows, scale)
    -> (out [n, H, hd], log-sum-exp [n, H], tensors to keep). backward: (what is known, layout,
    rows, scale) -> dS = P (dO V' - delta), P = exp(S - lse) put through to query, key, value.
    grouped: keys may have fewer heads than queries."""

    forward: Callable[..., Found]
    backward: Callable[[Known, PassLayout, Tensor | None, float], Gradients]
    grouped: bool


def kernel_for(query: Tensor, value: Tensor) -> Kernel:
    """What computes the causal part for these tensors."""
    found, size = KERNELS.get(query.device.type, BLOCKS), query.shape[-1]
    if found is not FLASH:
        return found
    short = query.dtype in (torch.float16, torch.bfloat16)
    fits = short and size == value.shape[-1] <= WIDEST and size % 8 == 0
    return FLASH if fits and _has_flash(query.device) else BLOCKS


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether this GPU runs flash attention."""
    modern = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    return modern and torch.backends.cuda.is_flash_attention_available()


def _cpu_forward(
    query: Tensor,
    pair: tuple[Tensor, Tensor],
    layout: PassLayout,
    rows: Tensor | None,
    scale: float,
) -> Found:
    if layout.window:  # the kernel would compute all scores and hide them by a mask
        return _block_forward(query, pair, layout, rows, scale)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    padded, length = unpack(query, layout, rows), layout.shape[1]
    if layout.starts == list(range(0, padded.shape[0] * length, length)):
        out, lse = flash(padded, *pair, 0.0, True, scale=scale)
    else:
        out = torch.empty_like(padded)
        lse = torch.empty(padded.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for first, end in pairwise(layout.edges):
            b, low = divmod(first, length)
            some = slice(b, b + 1), slice(None), slice(low, low + end - first)
            out[some], lse[some] = flash(
                padded[some], pair[0][some], pair[1][some], 0.0, True, scale=scale
            )
    return pack(out, rows), pack(lse[..., None], rows)[..., 0], ()


def _block_forward(
    query: Tensor,
    pair: tuple[Tensor, Tensor],
    layout: PassLayout,
    rows: Tensor | None,
    scale: float,
) -> Found:
    (key, value), heads = pair, query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = torch.empty(query.shape[:2], dtype=wide, device=query.device)
    for block in _blocks(layout, rows, heads, key.shape[1]):
        k, v = key[block.far], value[block.far]
        scores = _flat(query[block.near] * scale, k).to(wide) @ k.mT.to(wide)
        scores = scores.unflatten(1, (-1, len(block.at)))
        scores = scores.masked_fill_(block.hidden, -torch.inf).flatten(1, 2)
        total = scores.logsumexp(-1, keepdim=True)
        attn = scores.sub_(total).exp_().to(v.dtype)
        out[block.near] = _unflat(torch.bmm(attn, v), len(block.at))
        lse[block.near] = _unflat(total, len(block.at))[..., 0]
    return out, lse, ()


def _block_gradients(
    known: Known, layout: PassLayout, rows: Tensor | None, scale: float
) -> Gradients:
    query, key, value, grad = known[:4]
    into_query = torch.empty_like(query)
    into_key, into_value = torch.zeros_like(key), torch.zeros_like(value)
    for block in _blocks(layout, rows, query.shape[1], key.shape[1]):
        k, v = key[block.far], value[block.far]
        q, g = _flat(query[block.near] * scale, k), _flat(grad[block.near], k)
        lse, delta = (_flat(t[block.near][..., None], k) for t in (known.lse, known.delta))
        attn = torch.sub(torch.bmm(q, k.mT), lse).exp_().unflatten(1, (-1, len(block.at)))
        attn = attn.masked_fill_(block.hidden, 0.0).flatten(1, 2).to(q.dtype)
        into_value[block.far] += torch.bmm(attn.mT, g)
        score = torch.bmm(g, v.mT).sub_(delta).mul_(attn)
        into_query[block.near] = _unflat(torch.bmm(score, k).mul_(scale), len(block.at))
        into_key[block.far] += torch.bmm(score.mT, q)
    return into_query, into_key, into_value


def _flash_forward(
    query: Tensor,
    pair: tuple[Tensor, Tensor],
    layout: PassLayout,
    rows: Tensor | None,
    scale: float,
) -> Found:
    key, value = (side_by_side(t) for t in pair)
    long = layout.longest
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        spread(query, layout, rows),
        key,
        value,
        layout.cuts,
        layout.cuts,
        long,
        long,
        0.0,
        True,
        False,
        scale=scale,
        **_flash_window(layout),
    )
    lse = lse.T  # [H, B * T] as documents side by side are told
    if rows is not None:
        out, lse = out.index_select(0, rows), lse.index_select(0, rows)
    return out, lse, (seed, offset)


def _flash_backward(
    known: Known, layout: PassLayout, rows: Tensor | None, scale: float
) -> Gradients:
    count, length = layout.shape
    key, value = (side_by_side(t) for t in (known.key, known.value))
    grad, query, out = (spread(t, layout, rows) for t in (known.grad, known.query, known.out))
    long = layout.longest
    into_query, into_key, into_value = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        spread(known.lse, layout, rows).T.contiguous(),
        layout.cuts,
        layout.cuts,
        long,
        long,
        0.0,
        True,
        known.seed,
        known.offset,
        scale=scale,
        **_flash_window(layout),
    )
    if rows is not None:
        into_query = into_query.index_select(0, rows)
    into = (t.unflatten(0, (count, length)).transpose(1, 2) for t in (into_key, into_value))
    return into_query, *into  # type: ignore[return-value]


def _flash_window(layout: PassLayout) -> dict[str, int]:
    """How flash attention is told of a window: positions before and behind a row's own."""
    if not layout.window:
        return {}
    return {"window_size_left": layout.window - 1, "window_size_right": 0}


CPU = Kernel(_cpu_forward, _block_gradients, grouped=False)
BLOCKS = Kernel(_block_forward, _block_gradients, grouped=True)
FLASH = Kernel(_flash_forward, _flash_backward, grouped=True)
KERNELS = {"cpu": CPU, "cuda": FLASH}  # by device, BLOCKS for all others


class _Block(NamedTuple):
    """Some heads of some rows of a document. near: of [n, H, ..]. far: of [B, Hkv, T, ..], the
    keys that any of them sees. at: [m] places of the rows in the document. hidden: [m, keys]
    bool, those that a row does not see."""

    near: tuple[slice, slice]
    far: tuple[int, slice, slice]
    at: Tensor
    hidden: Tensor


def _blocks(layout: PassLayout, rows: Tensor | None, heads: int, kv: int) -> Iterator[_Block]:
    length, groups, device = layout.shape[1], heads // kv, layout.rows.device
    slots, window = torch.arange(length, device=device), layout.window
    for first, start, part, keys in _bands(layout, rows):
        b, low = divmod(first, length)
        at = (
            slots[part.start : part.stop]
            if rows is None
            else rows[start : start + len(part)] - first
        )
        spots = slots[keys.start : keys.stop]
        hidden = spots > at[:, None]
        if window:
            hidden |= spots <= at[:, None] - window
        some = max(1, BLOCK // (len(part) * len(keys) * groups))
        for h in range(0, kv, some):
            last = min(h + some, kv)
            yield _Block(
                (slice(start, start + len(part)), slice(h * groups, last * groups)),
                (b, slice(h, last), slice(low + keys.start, low + keys.stop)),
                at,
                hidden,
            )


def _bands(layout: PassLayout, rows: Tensor | None) -> Iterator[tuple[int, int, range, range]]:
    """(flat position where a document begins, number of the first row, rows, keys) of each
    block, the rows as their places in the document or their numbers: a document whole, or
    with a window in bands whose rows see little that the others do not."""
    start, window = 0, layout.window
    for i, (first, end) in enumerate(pairwise(layout.edges)):
        size, count, reach = end - first, end - first, end - first
        if rows is not None:
            count, reach = layout.counts[i], layout.reaches[i]
        if count and (not window or reach <= window):
            yield first, start, range(count), range(reach)
        elif count:
            step = max(LEAST_BAND, window // 4)
            edges = np.arange(0, size + step, step).clip(max=size)
            cuts = (
                edges
                if rows is None
                else layout.host[start : start + count].searchsorted(edges + first)
            )
            for low, high in pairwise(cuts.tolist()):
                if low == high:
                    continue
                least, most = low, high - 1
                if rows is not None:
                    least, most = (int(layout.host[start + n]) - first for n in (least, most))
                keys = range(max(0, least - window + 1), most + 1)
                yield first, start + low, range(low, high), keys
        start += count


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """[m, h * g, c] -> [h, g * m, c] for h heads of `like` [h, .., ..]."""
    return x.unflatten(1, (like.shape[0], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _unflat(x: Tensor, rows: int) -> Tensor:
    """[h, g * m, c] -> [m, h * g, c]."""
    return x.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).flatten(1, 2)
