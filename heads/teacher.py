"""Where the target's distribution of the predicted tokens comes from: its own LM head, or
features on disk (train/features) that hold its most probable tokens.

Shape letters: N rows of features, D width, V vocabulary, Vd draft vocabulary, n predicted
tokens, m tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.decode.target import Target
from outrider.heads import vocab


class Teacher(NamedTuple):
    """The target's distribution of m tokens over a draft vocabulary. probs: [m, Vd],
    renormalised there. raw_probs: [m, Vd], as the target gives them; the rest is outside.
    usable: [m] bool, there is something to learn from."""

    probs: Tensor
    raw_probs: Tensor
    usable: Tensor


TeacherFn = Callable[[slice], Teacher]  # tokens of a chunk -> their teacher


def target_distribution(
    target: Target,
    rows: tuple[Tensor, Tensor | None],
    feats: Tensor,
    source: Tensor,
    ids: Tensor | None,
    place: Tensor,
    mask: str,
    top_k: int = 0,
) -> TeacherFn:
    """Return the target's distribution p(x_s | x_<s) at n predicted tokens over a draft
    vocabulary, renormalised and (of all rows) as it is.

    rows: weight [Vd, D] and bias [Vd] or None of the target's LM head over the draft
    vocabulary, or over all V tokens. feats: [N, D], output of the target after its final
    norm. source: [n] int64, the row of feats that predicts token j. ids: [Vd] int64
    ascending draft vocabulary, None for all. place: [n] int64, where the token of the data
    is in it, -1 outside. mask: which tokens are taught, see losses.LossWeights
    ("argmax", of all rows, is EAGLE-3's). top_k: keep only so many most probable tokens of
    the distribution (HASS); 0 = all."""
    weight, bias = rows
    inside = None if ids is None else vocab.to_t2d(ids, target.vocab_size)
    less = bool(top_k) if ids is None else len(weight) > len(ids)

    def distribution(part: slice) -> Teacher:
        with torch.no_grad():
            logits = target.head.finish(functional.linear(feats[source[part]], weight, bias))
            usable = torch.ones_like(place[part], dtype=torch.bool)
            if mask == "token":
                usable = place[part] >= 0
            elif mask == "argmax" and inside is not None:
                usable = inside[logits.argmax(-1)]
            own = torch.softmax(logits, -1) if less else None
            if own is not None and ids is not None:
                own, logits = own.index_select(-1, ids), logits.index_select(-1, ids)
            if top_k:
                floor = logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
                logits = logits.masked_fill(logits < floor, -torch.inf)
            p = torch.softmax(logits, -1)
            return Teacher(p, p if own is None else own * (p > 0), usable)

    return distribution
