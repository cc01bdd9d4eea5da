"""Attention of training-time test (EAGLE-3, Li et al. 2025; HASS, Zhang et al. 2024), exact
and without big masks.

At step s a row attends to the step-0 keys up to itself and to *its own* keys of steps 1..s:
what a drafter has in its cache after s drafted tokens. The first part is plain causal
attention by a flash kernel; the second is one number per row and step; both softmaxes are
merged by their log-sum-exp. The backward pass of the first part then needs only the merged
output and log-sum-exp.

`dense` says it in plain operations. The merging stands in heads/layers/merged.py, what computes
the first part on which device in heads/layers/kernels.py.

With a sliding window (Beltagy et al. 2020) a row looks at so many positions at most, its own
among them, as engines count them. At step s a row stands s positions behind the last key of
step 0 that it sees, so s fewer of those keys are left to it.

Shape letters: B rows, T positions, n packed rows, H query heads, Hkv key heads, g = H / Hkv, hd
head size, S later steps.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.heads.layers.kernels import kernel_for
from outrider.heads.layers.layout import PassLayout, pack, unpack
from outrider.heads.layers.merged import merged

NAME = "outrider_ttt"


class Memory:
    """Keys and values of one training pass. `step` is set by the caller. window: positions that
    a row sees at most, more than there are steps; 0 = all."""

    def __init__(self, layout: PassLayout, window: int = 0) -> None:
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
    query: Tensor, layout: PassLayout, scale: float, first: tuple[Tensor, Tensor], own: list[Tensor]
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
    padded = unpack(query, layout, rows)
    at = torch.arange(count * length, device=query.device)
    number = torch.bucketize(at, layout.cuts.long(), right=True).view(count, length)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    if layout.window:
        future = future | ~torch.ones_like(future).triu(1 - layout.window)
    hidden = (number[:, :, None] != number[:, None, :]) | future
    scores = (padded @ key.mT * scale).masked_fill(hidden[:, None], -torch.inf)
    scores = pack(scores, rows)  # [n, H, T]
    diagonal = [(query * k).sum(-1, keepdim=True) * scale for k in repeated[0::2]]
    attn = torch.cat([scores, *diagonal], -1).softmax(-1)
    out = pack(unpack(attn[..., :length], layout, rows) @ value, rows)
    for i, v in enumerate(repeated[1::2]):
        out = out + attn[..., length + i, None] * v
    return out.to(narrow)
