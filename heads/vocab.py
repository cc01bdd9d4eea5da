"""The draft vocabulary: a head that predicts 8,192 frequent tokens instead of all V drafts
several times cheaper.

Two maps, in the convention of EAGLE-3 that the serving engines read: `d2t[i]` = target id of
draft id i, minus i (an int64 *offset*), and `t2d[id]` = whether target token `id` is in the
draft vocabulary (a bool mask).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from outrider.conf.errors import UserError
from outrider.conf.typed import SHORT
from outrider.decode.target import Target


def choose(counts: Tensor, size: int, key: str = "head.draft_vocab") -> Tensor:
    """Return the ids of the `size` most frequent tokens, ascending: [size] int64.

    counts: [V] int64, occurrences among supervised tokens. Ties go to the lower id. Raises
    UserError when fewer than `size` different tokens were seen: the rest would be guesses."""
    seen = int((counts > 0).sum())
    if size > seen:
        raise UserError(
            f"{key}: {size} is larger than the {seen} different tokens seen in the supervised "
            f"data; set {key}={max(1, seen)} or less, or 0 for the whole vocabulary"
        )
    order = torch.sort(counts.to("cpu"), descending=True, stable=True).indices
    return order[:size].sort().values


def problems(size: int, chosen: int, known: int) -> list[str]:
    """Return what is wrong with a saved vocabulary of `size` tokens, "key: what"; [].

    chosen: how many of them are drafted, 0 for all. known: tokens of the target."""
    found = [] if size == known else [f"vocab_size: {SHORT.repr(size)}, the target's is {known}"]
    return found if chosen <= known else [*found, f"config.draft_vocab: {chosen} of {known} tokens"]


def ascends(ids: Tensor, size: int) -> bool:
    """Return whether `ids` [Vd] are different tokens of a vocabulary of `size`, in order,
    and any at all."""
    if not ids.numel():
        return False
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < size


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of supervised tokens that the draft vocabulary `ids` covers, 0 to 1."""
    total = int(counts.sum())
    return float(counts[ids.to(counts.device)].sum()) / total if total else 0.0


def to_d2t(ids: Tensor) -> Tensor:
    """Ascending target ids [Vd] -> offsets [Vd] int64."""
    return ids - torch.arange(ids.numel(), device=ids.device)


def from_d2t(d2t: Tensor) -> Tensor:
    """Offsets [Vd] -> target ids [Vd] int64."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def to_t2d(ids: Tensor, vocab_size: int) -> Tensor:
    """[V] bool: token is in the draft vocabulary."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)


def places(ids: Tensor | None, tokens: Tensor) -> Tensor:
    """Draft ids of target `tokens` (any shape), -1 outside. ids: ascending [Vd], None: all."""
    if ids is None:
        return tokens
    spot = torch.searchsorted(ids, tokens).clamp_(max=ids.numel() - 1)
    return torch.where(ids[spot] == tokens, spot, -1)


def table(target: Target, ids: Tensor) -> Tensor:
    """Return rows [.., D] of the target's embedding table for tokens `ids` [..], as engines
    hand them to a draft layer: what the embedding module makes of them (Gemma's multiplies)
    is left out."""
    return embedding(ids, target.embedding_weight)
