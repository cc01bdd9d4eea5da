"""What a head's training pass would draft: the teacher-forced side of every comparison with
decoding.

A head is *forced* when it reads the true tokens in place of its own. As long as its drafts are
right both are the same reads, so a forced pass tells what a chain accepts at every place of a
text (heads/parity.py), and the ranks of the right tokens tell what a tree would
(heads/shapes.py).

Shape letters: B rows, T positions, S levels of a draft, A anchors, m tokens of a chunk, Vd
draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Batch, Head

# Share of the largest logit by which two orders of evaluation may differ: the drafter's cached
# passes of few rows and the training pass over whole texts. 16-bit: measured on
# SmolLM2.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Forced:
    """hit, sure: [B, T, S] bool at (row, place of the first token to draft, level): the
    training pass drafts the text's token there; and by more than rounding, either way. seen:
    [B, T, S] bool, the place was looked at."""

    hit: Tensor
    sure: Tensor
    seen: Tensor


@torch.no_grad()
def judge(head: Head, batch: Batch, target: Target, levels: int) -> Forced:
    """Where the supervised text of `batch` is what a chain of `levels` would draft. A tie goes
    to the token that argmax takes, and is not sure."""
    tokens, ids, size = batch.ids.reshape(-1), head.ids(), batch.ids.numel()
    hit, sure, seen = torch.zeros(3, size, levels, dtype=torch.bool, device=tokens.device)
    for flat, level, z in head.forced(batch, target, levels):
        place = vocab.places(ids, tokens[flat])
        best = z.topk(min(2, z.shape[1]), -1)
        own = z.gather(1, place.clamp(min=0)[:, None])[:, 0].masked_fill(place < 0, -torch.inf)
        right = z.argmax(-1) == place
        lead = torch.where(right, best.values[:, 0] - best.values[:, -1], best.values[:, 0] - own)
        spot = flat - level
        hit[spot, level], seen[spot, level] = right, True
        sure[spot, level] = lead > ROUNDING[target.dtype] * z.abs().amax(-1)
    return Forced(*(t.view(*batch.ids.shape, levels) for t in (hit, sure, seen)))
