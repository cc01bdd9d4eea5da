"""Attention of the rows of blocks, by one softmax, to the features before their anchors and to
the rows of their own block. Nothing of size rows x context is kept for the backward pass.

CUDA's flash attention takes it in calls without a mask, merged by their log-sum-exp: the
features up to a multiple of STRIDE, which are the same for neighbouring anchors, and the few
between there and the anchor together with the block's own rows. Elsewhere the scores of some
anchors exist at a time, and the backward pass computes them again.

Shape letters: B rows, T features, A blocks of a row, R rows of a block, n = A * R, H query
heads, Hkv key heads, hd head size, s sequences, m keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.decode import devices
from outrider.heads.batch import moved
from outrider.heads.block.anchors import Anchors
from outrider.heads.layers.attention import FLASH, kernel_for

Keys = tuple[Tensor, Tensor]  # keys and values
BLOCK = 1 << 22  # scores that exist at the same time without flash attention
STRIDE = 128  # features
MOST = 1 << 15  # keys of a call of flash attention, which reads copies of them


@dataclass(frozen=True)
class Reads:
    """What one call of flash attention reads for some rows of a document.

    rows: which. keys: [m] int64, the keys of all sequences, out of the T features and the n
    rows' own behind them. cuts: [s + 1] int32 each, where sequences of rows and of keys begin.
    longest: rows and keys of the longest sequence."""

    rows: slice
    keys: Tensor
    cuts: tuple[Tensor, Tensor]
    longest: tuple[int, int]

    @classmethod
    def of(cls, first: int, rows: Tensor, *ranges: tuple[Tensor, Tensor]) -> Iterator[Reads]:
        """Yield calls of MOST keys and one sequence at most. first: row. rows: [s] of each
        sequence. ranges: where its keys begin and how many, [s] each."""
        begin, count = (torch.stack(side, 1) for side in zip(*ranges, strict=True))
        sizes = count.sum(1)
        _, many = ((sizes.cumsum(0) - 1) // MOST).unique_consecutive(return_counts=True)
        for n, size, start, amount in zip(
            *(t.split(many.tolist()) for t in (rows, sizes, begin, count)), strict=True
        ):
            start, amount = start.flatten(), amount.flatten()
            ends = amount.cumsum(0)
            keys = torch.arange(int(ends[-1])) + (start - ends + amount).repeat_interleave(amount)
            cuts = [F.pad(each.cumsum(0), (1, 0)).int() for each in (n, size)]
            last = first + int(n.sum())
            longest = int(n.max()), int(size.max())
            yield cls(slice(first, last), keys, (cuts[0], cuts[1]), longest)
            first = last


def reads_of(place: Tensor, rows: int, length: int) -> tuple[Reads, ...]:
    """place: [A] of the anchors of a document, ascending, on the CPU. rows: R. length: T."""
    low = place // STRIDE * STRIDE
    behind = length + rows * torch.arange(len(place)), torch.full_like(place, rows)
    near = Reads.of(0, behind[1], (low, place - low), behind)
    many, blocks = low[low > 0].unique_consecutive(return_counts=True)
    if not len(many):
        return tuple(near)
    far = Reads.of(int((low == 0).sum()) * rows, blocks * rows, (0 * many, many))
    return *near, *far


class BlockAttention:
    """Of all layers of a pass. rows: R. context: of every layer the keys and values of the
    features, [B, Hkv, T, hd] each."""

    def __init__(self, anchors: Anchors, rows: int, context: list[Keys]) -> None:
        self.anchors, self.rows, self.context = anchors, rows, context
        self.length = context[0][0].shape[2]

    def __call__(self, layer: int, query: Tensor, own: Keys) -> Tensor:
        """query: [B, H, n, hd]. own: keys and values of the rows, [B, Hkv, n, hd] each. -> [B,
        H, n, hd]."""
        with torch.autocast(query.device.type, enabled=False):
            way = self._flash if kernel_for(query) is FLASH else self._dense
            return way(query, self.context[layer], own)

    @functools.cached_property
    def reads(self) -> tuple[tuple[Reads, ...], ...]:
        """Of every document, on its device."""
        places = (torch.tensor(places) for places in self.anchors.known)
        found = tuple(reads_of(place, self.rows, self.length) for place in places)
        device = self.anchors.place.device
        return moved(found, lambda t: devices.send(t, device))  # type: ignore[no-any-return]

    def _flash(self, query: Tensor, far: Keys, own: Keys) -> Tensor:
        scale, documents = query.shape[-1] ** -0.5, []
        pair = [torch.cat(both, 2).transpose(1, 2) for both in zip(far, own, strict=True)]
        for each in zip(query.transpose(1, 2), *pair, self.reads, strict=True):
            documents.append(_Flash.apply(*each, scale))  # type: ignore[no-untyped-call]
        return torch.stack(documents).transpose(1, 2)

    def _dense(self, query: Tensor, far: Keys, own: Keys) -> Tensor:
        (key, value), place = far, self.anchors.place
        some = max(1, BLOCK // (query[..., 0].numel() // place.shape[1] * self.length))
        if some >= place.shape[1]:
            return attend_blocks(query, key, value, *own, place)
        reach = [max(places) for places in zip(*self.anchors.known, strict=True)]
        found = list[Tensor]()
        parts = (t.split(some * self.rows, 2) for t in (query, *own))
        for q, *mine, at in zip(*parts, place.split(some, 1), strict=True):
            most, reach = reach[:some][-1], reach[some:]
            given = (q, key[:, :, :most], value[:, :, :most], *mine, at)
            found.append(
                checkpoint(attend_blocks, *given, use_reentrant=False, preserve_rng_state=False)
            )
        return torch.cat(found, 2)


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, place: Tensor
) -> Tensor:
    """BlockAttention of some blocks by plain operations. place: [B, A] of their anchors. key,
    value: [B, Hkv, T, hd] of as many features as one of them sees."""
    blocks, kv, length, size = place.shape[1], *key.shape[1:]
    q = (query * size**-0.5).unflatten(2, (blocks, -1)).unflatten(1, (kv, -1))
    mine = [t.unflatten(2, (blocks, -1))[:, :, None] for t in (own_key, own_value)]
    wide = torch.promote_types(query.dtype, torch.float32)
    to_far = (q.flatten(2, 4) @ key.mT).view(*q.shape[:5], length).to(wide)
    hidden = torch.arange(length, device=place.device) >= place[..., None, None]
    to_far = to_far.masked_fill(hidden[:, None, None], -torch.inf)
    attn = torch.cat([to_far, (q @ mine[0].mT).to(wide)], -1).softmax(-1).to(query.dtype)
    out = (attn[..., :length].flatten(2, 4) @ value).view(q.shape)
    return (out + attn[..., length:] @ mine[1]).flatten(1, 2).flatten(2, 3)


class _Flash(torch.autograd.Function):
    """Of a document. query: [n, H, hd]. key, value: [T + n, Hkv, hd]. The backward pass of
    each call starts from the merged output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, reads: tuple[Reads, ...], scale: float
    ) -> Tensor:
        out, kept = torch.zeros_like(query), list[Tensor]()
        wide = torch.promote_types(query.dtype, torch.float32)
        total = query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        for part in reads:
            found, lse, *seed, _ = torch.ops.aten._flash_attention_forward(
                *(query[part.rows], key[part.keys], value[part.keys]),
                *(*part.cuts, *part.longest, 0.0, False, False),
                scale=scale,
            )
            kept += seed
            so_far, before, lse = out[part.rows], total[part.rows], lse.T
            merged = torch.logaddexp(before, lse)
            so_far.mul_((before - merged).exp()[..., None])
            so_far.addcmul_(found, (lse - merged).exp()[..., None].to(found.dtype))
            before.copy_(merged)
        ctx.reads, ctx.scale = reads, scale
        ctx.save_for_backward(query, key, value, out, total, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total, *kept = ctx.saved_tensors
        into_query = torch.zeros_like(query)
        pair = [torch.zeros_like(t, dtype=total.dtype) for t in (key, value)]
        for part in ctx.reads:
            q, g, o, lse = (t[part.rows] for t in (query, grads[0], out, total))
            into, *found = torch.ops.aten._flash_attention_backward(
                *(g.contiguous(), q, key[part.keys], value[part.keys], o, lse.T.contiguous()),
                *(*part.cuts, *part.longest, 0.0, False, kept.pop(0), kept.pop(0)),
                scale=ctx.scale,
            )
            into_query[part.rows] += into
            for side, grad in zip(pair, found, strict=True):
                side.index_add_(0, part.keys, grad.to(side.dtype))
        return into_query, *(t.to(key.dtype) for t in pair), None, None
