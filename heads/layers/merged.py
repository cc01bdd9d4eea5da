"""Attention of training-time test in two parts that are merged by their log-sum-exp: keys of step
0 by a flash kernel, a row's own later keys as one number for each of them.

Shape letters: as in heads/layers/attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.heads.layers.kernels import Kernel, Known, kernel_for
from outrider.heads.layers.layout import PassLayout


def merged(
    query: Tensor,
    layout: PassLayout,
    rows: Tensor | None,
    scale: float,
    first: tuple[Tensor, Tensor],
    own: list[Tensor],
    kernel: Kernel | None = None,
) -> Tensor:
    """As heads.layers.attention.dense. rows: [n] of `query`, None: all B * T of them. kernel:
    None: as the device wants it."""
    kernel = kernel or kernel_for(query, first[1])
    return _Merged.apply(query, layout, rows, scale, kernel, *first, *own)  # type: ignore[no-any-return]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        layout: PassLayout,
        rows: Tensor | None,
        scale: float,
        kernel: Kernel,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, total, kept = kernel.forward(query, (key, value), layout, rows, scale)
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
        ctx.layout, ctx.rows, ctx.scale, ctx.kernel = layout, rows, scale, kernel
        ctx.kept = len(kept)
        ctx.save_for_backward(query, key, value, out, total, *kept, *attns, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total, *rest = ctx.saved_tensors
        kept, rest = rest[: ctx.kept], rest[ctx.kept :]
        attns, own = rest[: len(rest) // 3], rest[len(rest) // 3 :]
        grad = grads[0].contiguous()
        delta = (grad * out).sum(-1, dtype=total.dtype)
        known = Known(query, key, value, grad, out, total, delta, *kept)
        into_query, into_key, into_value = ctx.kernel.backward(
            known, ctx.layout, ctx.rows, ctx.scale
        )
        found: list[Tensor] = []
        for attn, k, v in zip(attns, own[0::2], own[1::2], strict=True):
            q, g, p = (_grouped(t, k) for t in (query, grad, attn))
            pull = (g * v[:, :, None]).sum(-1, dtype=total.dtype)
            score = p * (pull - _grouped(delta, k)).mul_(ctx.scale).to(p.dtype)
            _grouped(into_query, k).addcmul_(score[..., None], k[:, :, None])
            found += [_over_groups(score[..., None] * q), _over_groups(p[..., None] * g)]
        return (into_query, None, None, None, None, into_key, into_value, *found)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[n, H, ..] -> [n, Hkv, g, ..], a view; Hkv: of `like`."""
    return x.unflatten(1, (like.shape[1], -1))


def _over_groups(x: Tensor) -> Tensor:
    """[n, Hkv, g, hd] -> [n, Hkv, hd], the sum."""
    return x[:, :, 0] if x.shape[2] == 1 else x.sum(2)
