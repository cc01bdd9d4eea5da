"""Attention of training-time test (EAGLE-3, Li et al. 2025; HASS, Zhang et al. 2024), exact
and without big masks.

At step s a row attends to the step-0 keys up to itself and to *its own* keys of steps 1..s:
what a drafter has in its cache after s drafted tokens. The first part is plain causal
attention by a flash kernel; the second is one number per row and step; both softmaxes are
merged by their log-sum-exp. The backward pass of the first part then needs only the merged
output and log-sum-exp.

What does the first part is chosen by device (`kernel_for`): the CPU's flash kernel, whose
backward pass runs document by document on dense blocks, which the CPU's matrix unit likes
several times better than the kernel's own; flash attention of CUDA, forward and backward,
documents side by side; and for everything else those dense blocks alone. None of them holds
scores of all heads, and only the CPU's takes keys that are repeated for their group of queries.

With a sliding window (Beltagy et al. 2020) a row looks at so many positions at most, its own
among them, as engines count them. At step s a row stands s positions behind the last key of
step 0 that it sees, so s fewer of those keys are left to it.

Shape letters: B rows, T positions, n packed rows, H query heads, Hkv key heads, g = H / Hkv, hd
head size, S later steps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "outrider_ttt"
BLOCK = 1 << 24  # scores that dense blocks hold at the same time
LEAST_BAND = 128  # positions that rows of a block lie in where a window cuts documents
WIDEST = 256  # head size that flash attention of CUDA takes


@dataclass(frozen=True)
class Layout:
    """Where documents and rows of a training pass lie. What is a list or a number is known to
    the host: no device is asked for it.

    shape: (B, T) of step 0. rows: [n] int64 flat positions that later steps go on with,
    ascending. starts: flat positions where documents begin, ascending; the padding may be one
    more. counts: rows of each document. reaches: tokens of each document up to its last row.
    cuts: [documents + 1] int32, `starts` and the end, where `rows` are. host: `rows` as an
    array that the host can read. window: how many keys of step 0 a row sees at most, up to its
    own place; 0 = all.
    """

    shape: tuple[int, int]
    rows: Tensor
    starts: list[int]
    counts: list[int]
    reaches: list[int]
    cuts: Tensor
    host: np.ndarray
    window: int = 0

    @classmethod
    def of(cls, shape: tuple[int, int], rows: Tensor, position: Tensor | None = None) -> Layout:
        """position: [B, T] int64 places of packed tokens in their documents, None: rows are
        documents. Reads `rows` and `position` back where they are on a device."""
        total = shape[0] * shape[1]
        starts = list(range(0, total, shape[1]))
        if position is not None:
            starts = (position.reshape(-1).cpu() == 0).nonzero()[:, 0].tolist()
        here, edges = rows.cpu(), torch.tensor([*starts, total])
        bounds = torch.searchsorted(here, edges)
        last = torch.cat([here.new_full((1,), -1), here])[bounds[1:]]
        counts = bounds.diff()
        reaches = torch.where(counts > 0, last + 1 - edges[:-1], 0)
        cuts = edges.to(torch.int32).to(rows.device)
        return cls(shape, rows, starts, counts.tolist(), reaches.tolist(), cuts, here.numpy())

    def seen(self, window: int) -> Layout:
        """The same with that window; one that no document fills is none."""
        return replace(self, window=window if 0 < window < self.longest else 0)

    @property
    def edges(self) -> list[int]:
        """`starts` and the end."""
        return [*self.starts, self.shape[0] * self.shape[1]]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max((end - start for start, end in pairwise(self.edges)), default=0)


class Memory:
    """Keys and values of one training pass. `step` is set by the caller. window: positions that
    a row sees at most, more than there are steps; 0 = all."""

    def __init__(self, layout: Layout, window: int = 0) -> None:
        self.whole, self.window = layout, window
        self.layout, self.step = layout.seen(window), 0
        # layer -> step 0: [B, Hkv, T, hd] each, repeated to H where the kernel wants it
        self.first: dict[int, tuple[Tensor, Tensor]] = {}
        # layer -> later steps: keys and values in turns, [n, Hkv or H, hd]
        self.later: dict[int, list[Tensor]] = {}

    def at(self, step: int) -> Memory:
        """A memory for `step` that adds nothing to this one: what a step finds can then be
        told to it again.
        """
        found = copy.copy(self)
        found.step, found.first = step, dict(self.first)
        if self.window:
            if step >= self.window:
                raise ValueError(f"step {step} of a window of {self.window} sees no row of step 0")
            found.layout = self.whole.seen(self.window - step)
        found.later = {layer: list(own) for layer, own in self.later.items()}
        return found


@torch.compiler.disable
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
    kernel = kernel_for(query, value)
    if groups > 1 and not kernel.grouped:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    if memory.step == 0:
        memory.first[layer] = (key, value)
        packed = query.transpose(1, 2).flatten(0, 1)
        out = merged(packed, memory.layout, None, scale, (key, value), [], kernel)
        return out.view(*memory.layout.shape, *out.shape[1:]), None
    own = memory.later.setdefault(layer, [])
    own += [key[0].transpose(0, 1), value[0].transpose(0, 1)]
    packed, rows = query[0].transpose(0, 1), memory.layout.rows
    out = merged(packed, memory.layout, rows, scale, memory.first[layer], own, kernel)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, ttt_attention)


def dense(
    query: Tensor, layout: Layout, scale: float, first: tuple[Tensor, Tensor], own: list[Tensor]
) -> Tensor:
    """The same by plain operations, with all scores of all heads; the reference.

    query: [n, H, hd]; own: [n, H or Hkv, hd]; first: [B, H or Hkv, T, hd] each -> [n, H, hd].
    Computed in float32 or better.
    """
    (count, length), rows, heads = layout.shape, layout.rows, query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (t.to(wide).repeat_interleave(heads // t.shape[1], 1) for t in first)
    repeated = [t.to(wide).repeat_interleave(heads // t.shape[1], 1) for t in own]
    query, narrow = query.to(wide), query.dtype
    padded = _unpack(query, layout, rows)
    at = torch.arange(count * length, device=query.device)
    number = torch.bucketize(at, layout.cuts.long(), right=True).view(count, length)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    if layout.window:
        future = future | ~torch.ones_like(future).triu(1 - layout.window)
    hidden = (number[:, :, None] != number[:, None, :]) | future
    scores = (padded @ key.mT * scale).masked_fill(hidden[:, None], -torch.inf)
    scores = _pack(scores, rows)  # [n, H, T]
    diagonal = [(query * k).sum(-1, keepdim=True) * scale for k in repeated[0::2]]
    law = torch.cat([scores, *diagonal], -1).softmax(-1)
    out = _pack(_unpack(law[..., :length], layout, rows) @ value, rows)
    for i, v in enumerate(repeated[1::2]):
        out = out + law[..., length + i, None] * v
    return out.to(narrow)


def merged(
    query: Tensor,
    layout: Layout,
    rows: Tensor | None,
    scale: float,
    first: tuple[Tensor, Tensor],
    own: list[Tensor],
    kernel: Kernel | None = None,
) -> Tensor:
    """As `dense`. rows: [n] of `query`, None: all B * T of them. kernel: None: as the device
    wants it."""
    kernel = kernel or kernel_for(query, first[1])
    return _Merged.apply(query, layout, rows, scale, kernel, *first, *own)  # type: ignore[no-any-return]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        layout: Layout,
        rows: Tensor | None,
        scale: float,
        kernel: Kernel,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, total, kept = kernel.forward(query, (key, value), layout, rows, scale)
        laws: list[Tensor] = []
        if own:
            grouped = _grouped(query, own[0])
            found = ((grouped * k[:, :, None]).sum(-1, dtype=wide).flatten(1) for k in own[0::2])
            parts = [total, *(score.mul_(scale) for score in found)]
            total = torch.logsumexp(torch.stack(parts), 0)  # [n, H]
            out = out * (parts[0] - total).exp()[..., None].to(query.dtype)
            laws = [(p - total).exp_().to(query.dtype) for p in parts[1:]]
            into = _grouped(out, own[0])
            for law, v in zip(laws, own[1::2], strict=True):
                into.addcmul_(_grouped(law, own[0])[..., None], v[:, :, None])
        ctx.layout, ctx.rows, ctx.scale, ctx.kernel = layout, rows, scale, kernel
        ctx.kept = len(kept)
        ctx.save_for_backward(query, key, value, out, total, *kept, *laws, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total, *rest = ctx.saved_tensors
        kept, rest = rest[: ctx.kept], rest[ctx.kept :]
        laws, own = rest[: len(rest) // 3], rest[len(rest) // 3 :]
        grad = grads[0].contiguous()
        delta = (grad * out).sum(-1, dtype=total.dtype)
        known = Known(query, key, value, grad, out, total, delta, *kept)
        into_query, into_key, into_value = ctx.kernel.backward(
            known, ctx.layout, ctx.rows, ctx.scale
        )
        found: list[Tensor] = []
        for law, k, v in zip(laws, own[0::2], own[1::2], strict=True):
            q, g, p = (_grouped(t, k) for t in (query, grad, law))
            pull = (g * v[:, :, None]).sum(-1, dtype=total.dtype)
            score = p * (pull - _grouped(delta, k)).mul_(ctx.scale).to(p.dtype)
            _grouped(into_query, k).addcmul_(score[..., None], k[:, :, None])
            found += [_over_groups(score[..., None] * q), _over_groups(p[..., None] * g)]
        return (into_query, None, None, None, None, into_key, into_value, *found)


# The causal part, by device
# -------------------------------------------------------------------------------------------


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
    backward: Callable[[Known, Layout, Tensor | None, float], Gradients]
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
    """Whether this GPU runs flash attention; where there is none, and the tensors have no
    numbers, it is taken for one that does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    modern = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    return modern and torch.backends.cuda.is_flash_attention_available()


def _cpu_forward(
    query: Tensor, pair: tuple[Tensor, Tensor], layout: Layout, rows: Tensor | None, scale: float
) -> Found:
    if layout.window:  # the kernel would compute all scores and hide them by a mask
        return _block_forward(query, pair, layout, rows, scale)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    padded, length = _unpack(query, layout, rows), layout.shape[1]
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
    return _pack(out, rows), _pack(lse[..., None], rows)[..., 0], ()


def _block_forward(
    query: Tensor, pair: tuple[Tensor, Tensor], layout: Layout, rows: Tensor | None, scale: float
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
        law = scores.sub_(total).exp_().to(v.dtype)
        out[block.near] = _unflat(torch.bmm(law, v), len(block.at))
        lse[block.near] = _unflat(total, len(block.at))[..., 0]
    return out, lse, ()


def _block_gradients(known: Known, layout: Layout, rows: Tensor | None, scale: float) -> Gradients:
    query, key, value, grad = known[:4]
    into_query = torch.empty_like(query)
    into_key, into_value = torch.zeros_like(key), torch.zeros_like(value)
    for block in _blocks(layout, rows, query.shape[1], key.shape[1]):
        k, v = key[block.far], value[block.far]
        q, g = _flat(query[block.near] * scale, k), _flat(grad[block.near], k)
        lse, delta = (_flat(t[block.near][..., None], k) for t in (known.lse, known.delta))
        law = torch.sub(torch.bmm(q, k.mT), lse).exp_().unflatten(1, (-1, len(block.at)))
        law = law.masked_fill_(block.hidden, 0.0).flatten(1, 2).to(q.dtype)
        into_value[block.far] += torch.bmm(law.mT, g)
        score = torch.bmm(g, v.mT).sub_(delta).mul_(law)
        into_query[block.near] = _unflat(torch.bmm(score, k).mul_(scale), len(block.at))
        into_key[block.far] += torch.bmm(score.mT, q)
    return into_query, into_key, into_value


def _flash_forward(
    query: Tensor, pair: tuple[Tensor, Tensor], layout: Layout, rows: Tensor | None, scale: float
) -> Found:
    key, value = (_side_by_side(t) for t in pair)
    long = layout.longest
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        _spread(query, layout, rows),
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


def _flash_backward(known: Known, layout: Layout, rows: Tensor | None, scale: float) -> Gradients:
    count, length = layout.shape
    key, value = (_side_by_side(t) for t in (known.key, known.value))
    grad, query, out = (_spread(t, layout, rows) for t in (known.grad, known.query, known.out))
    long = layout.longest
    into_query, into_key, into_value = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        _spread(known.lse, layout, rows).T.contiguous(),
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


def _flash_window(layout: Layout) -> dict[str, int]:
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


def _blocks(layout: Layout, rows: Tensor | None, heads: int, kv: int) -> Iterator[_Block]:
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


def _bands(layout: Layout, rows: Tensor | None) -> Iterator[tuple[int, int, range, range]]:
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


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[n, H, ..] -> [n, Hkv, g, ..], a view; Hkv: of `like`."""
    return x.unflatten(1, (like.shape[1], -1))


def _over_groups(x: Tensor) -> Tensor:
    """[n, Hkv, g, hd] -> [n, Hkv, hd], the sum."""
    return x[:, :, 0] if x.shape[2] == 1 else x.sum(2)


def _spread(x: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
    """[n, ..] -> [B * T, ..], zeros where no row is."""
    if rows is None:
        return x
    count, length = layout.shape
    return x.new_zeros(count * length, *x.shape[1:]).index_copy_(0, rows, x)


def _side_by_side(x: Tensor) -> Tensor:
    """[B, h, T, hd] -> [B * T, h, hd]."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpack(x: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
    """[n, H, c] -> [B, H, T, c], zeros where no row is."""
    return _spread(x, layout, rows).unflatten(0, layout.shape).transpose(1, 2)


def _pack(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, H, T, c] -> [n, H, c]."""
    x = _side_by_side(x)
    return x if rows is None else x.index_select(0, rows)
