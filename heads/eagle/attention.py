"""Attention of training-time test (EAGLE-3, Li et al. 2025; HASS, Zhang et al. 2024), exact
and without big masks.

At step s a row attends to the step-0 keys up to itself and to *its own* keys of steps 1..s:
what a drafter has in its cache after s drafted tokens. The first part is plain causal
attention by the flash kernel; the second is one number per row and step; both softmaxes are
merged by their log-sum-exp. The backward pass of the first part then needs only the merged
output and log-sum-exp; it runs sample by sample on dense blocks, which the CPU's matrix unit
likes several times better than the flash kernel's own.

Shape letters: B rows, T positions, n packed rows, H query heads, Hkv key heads, hd head size,
S later steps.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "outrider_ttt"
BLOCK = 1 << 24  # scores that the backward pass holds at the same time


class Memory:
    """Keys and values of one training pass. shape: (B, T) of step 0. rows: [n] flat positions
    that later steps go on with. position: [B, T] places of packed tokens in their documents,
    None: rows are documents. `step` is set by the caller. starts: flat positions where
    documents begin, ascending; the padding may be one more."""

    def __init__(
        self, shape: tuple[int, int], rows: Tensor, position: Tensor | None = None
    ) -> None:
        self.shape, self.rows, self.step = shape, rows, 0
        self.hidden: Tensor | None = None  # [B, T, T] bool, packed: slots that a row must not see
        self.starts = list(range(0, shape[0] * shape[1], shape[1]))
        if position is not None:
            number = (position == 0).cumsum(1)
            future = torch.ones(shape[1], shape[1], dtype=torch.bool, device=position.device).triu(
                1
            )
            self.hidden = (number[:, :, None] != number[:, None, :]) | future
            self.starts = (position.reshape(-1) == 0).nonzero()[:, 0].tolist()
        self.first: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # layer -> [B, H, T, hd] each, groups expanded
        self.later: dict[int, list[Tensor]] = {}  # layer -> [n, H, hd] keys and values in turns

    def at(self, step: int) -> Memory:
        """A memory for `step` that adds nothing to this one: what a step finds can then be
        told to it again.
        """
        found = copy.copy(self)
        found.step, found.first = step, dict(self.first)
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
    """transformers' attention interface. Step 0: query [B, H, T, hd] -> [B, T, H, hd]; later:
    [1, H, n, hd] -> [1, n, H, hd]. Rows are right-padded, so step 0 is causal without a mask."""
    assert memory is not None, "ttt_attention needs the memory of its training pass"
    layer, groups = cast(int, module.layer_idx), query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    if memory.step == 0:
        memory.first[layer] = (key, value)
        if query.device.type == "cpu":
            out = _merged(
                query.transpose(1, 2).flatten(0, 1), memory, None, scale, (key, value), []
            )
            return out.view(*memory.shape, *out.shape[1:]), None
        seen = None if memory.hidden is None else ~memory.hidden[:, None]
        out = F.scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, scale=scale
        )
        return out.transpose(1, 2), None
    own = memory.later.setdefault(layer, [])
    own += [key[0].transpose(0, 1), value[0].transpose(0, 1)]
    packed = query[0].transpose(0, 1)
    if query.device.type == "cpu":
        return _merged(packed, memory, memory.rows, scale, memory.first[layer], own)[None], None
    return dense(packed, memory, scale, memory.first[layer], own)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, ttt_attention)


def dense(
    query: Tensor, memory: Memory, scale: float, first: tuple[Tensor, Tensor], own: list[Tensor]
) -> Tensor:
    """The same by plain operations; the reference, and the path of devices without the CPU's
    flash kernel.

    query, own: [n, H, hd]; first: [B, H, T, hd] each -> [n, H, hd].
    """
    (rows_b, length), (key, value) = memory.shape, first
    padded = query.new_zeros(rows_b * length, *query.shape[1:]).index_copy(0, memory.rows, query)
    padded = padded.view(rows_b, length, *query.shape[1:]).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (padded @ key.transpose(-1, -2)).to(wide) * scale
    future: Tensor = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    future = future if memory.hidden is None else memory.hidden[:, None]
    scores = (
        scores.masked_fill(future, -torch.inf).transpose(1, 2).flatten(0, 1)[memory.rows]
    )  # [n, H, T]
    diagonal = torch.stack([(query * k).sum(-1, dtype=wide) for k in own[0::2]], -1) * scale
    law = torch.cat([scores, diagonal], -1).softmax(-1).to(value.dtype)
    context = law.new_zeros(rows_b * length, *law.shape[1:-1], length).index_copy(
        0, memory.rows, law[..., :length]
    )
    context = context.view(rows_b, length, -1, length).transpose(1, 2) @ value
    out = context.transpose(1, 2).flatten(0, 1)[memory.rows]
    for i, v in enumerate(own[1::2]):
        out = out + law[..., length + i, None] * v
    return out


def _merged(
    query: Tensor,
    memory: Memory,
    rows: Tensor | None,
    scale: float,
    first: tuple[Tensor, Tensor],
    own: list[Tensor],
) -> Tensor:
    """As `dense`; rows [n] of `query`, None: all B * T of them."""
    return _Merged.apply(query, memory, rows, scale, *first, *own)  # type: ignore[no-any-return]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        memory: Memory,
        rows: Tensor | None,
        scale: float,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        padded = _unpack(query, memory.shape, rows)
        mask = None
        if memory.hidden is not None:
            mask = torch.zeros(memory.hidden.shape, dtype=query.dtype).masked_fill_(
                memory.hidden, -torch.inf
            )[:, None]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            padded, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        merged, total, laws = _pack(out, rows), _pack(lse[..., None], rows)[..., 0], []
        if own:
            parts = [total, *((query * k).sum(-1, dtype=wide).mul_(scale) for k in own[0::2])]
            total = torch.logsumexp(torch.stack(parts), 0)  # [n, H]
            merged = merged * (parts[0] - total).exp()[..., None].to(query.dtype)
            laws = [(p - total).exp_().to(query.dtype) for p in parts[1:]]
            for law, v in zip(laws, own[1::2], strict=True):
                merged.addcmul_(law[..., None], v)
        ctx.shape, ctx.rows, ctx.scale, ctx.starts = memory.shape, rows, scale, memory.starts
        ctx.save_for_backward(query, key, value, merged, total, *laws, *own)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, merged, total, *rest = ctx.saved_tensors
        laws, own = rest[: len(rest) // 3], rest[len(rest) // 3 :]
        grad = grads[0].contiguous()
        delta = (grad * merged).sum(-1, dtype=total.dtype)
        into_query, into_key, into_value = _causal_gradients(
            ctx, (query, key, value), grad, total, delta
        )
        found: list[Tensor] = []
        for law, k, v in zip(laws, own[0::2], own[1::2], strict=True):
            score = law * ((grad * v).sum(-1, dtype=total.dtype) - delta).mul_(ctx.scale).to(
                law.dtype
            )
            into_query.addcmul_(score[..., None], k)
            found += [score[..., None] * query, law[..., None] * grad]
        return (into_query, None, None, None, into_key, into_value, *found)


def _causal_gradients(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the causal part with respect to its inputs (query, key, value): dS = P (dO V'
    - delta), P = exp(S - lse) with the *merged* lse [n, H] and delta."""
    query, key, value = inputs
    (count, length), rows, scale, starts = ctx.shape, ctx.rows, ctx.scale, ctx.starts
    into_query, into_key, into_value = (
        torch.empty_like(query),
        torch.zeros_like(key),
        torch.zeros_like(value),
    )
    ends = torch.tensor([*starts[1:], count * length])
    bounds = ends.tolist() if rows is None else torch.searchsorted(rows, ends).tolist()
    slots, start = torch.arange(length), 0
    for first, end, stop in zip(starts, ends.tolist(), bounds, strict=True):
        if stop == start:
            continue
        b, low = divmod(first, length)
        at = slots[: end - first] if rows is None else rows[start:stop] - first
        reach = int(at[-1]) + 1
        seen = slice(low, low + reach)
        future = slots[:reach] > at[:, None]
        heads = max(1, BLOCK // (len(at) * reach))
        for h in range(0, query.shape[1], heads):
            part = slice(h, h + heads)
            q, g = (
                (query[start:stop, part] * scale).transpose(0, 1),
                grad[start:stop, part].transpose(0, 1),
            )
            k, v = key[b, part, seen], value[b, part, seen]
            law = torch.sub(torch.bmm(q, k.mT), lse[start:stop, part].T[..., None]).exp_()
            law = law.masked_fill_(future, 0.0).to(q.dtype)
            into_value[b, part, seen] = torch.bmm(law.mT, g)
            score = torch.bmm(g, v.mT).sub_(delta[start:stop, part].T[..., None]).mul_(law)
            into_query[start:stop, part] = torch.bmm(score, k).mul_(scale).transpose(0, 1)
            into_key[b, part, seen] = torch.bmm(score.mT, q)
        start = stop
    return into_query, into_key, into_value


def _unpack(x: Tensor, shape: tuple[int, int], rows: Tensor | None) -> Tensor:
    """[n, H, c] -> [B, H, T, c], zeros where no row is."""
    if rows is not None:
        x = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy_(0, rows, x)
    return x.view(*shape, *x.shape[1:]).transpose(1, 2)


def _pack(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, H, T, c] -> [n, H, c]."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if rows is None else x.index_select(0, rows)
