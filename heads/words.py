"""Which weights of a head go by the tokens that it drafts, and a frozen head whose draft
vocabulary takes in other tokens.

A LoRA learns beside weights that stay. Of the tokens of its data a frozen head drafts those
alone that it was once given, and a domain has words of its own: `with_words` gives up tokens
that the data lack for as many that they have. A token that both vocabularies have keeps its
rows; a new one has those of a fresh head, from the target's LM head. So the moved head is known
by its own weights, the target and the two lists of tokens, which is what an adapter keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head

# Weights by the last parts of their names, and their axis of the draft vocabulary.
TOKENS = {"lm_head.weight": 0, "markov_out": 0, "proj": 1}


def axis_of(name: str, weight: Tensor, head: Head) -> int | None:
    """The axis of `weight` that goes by the tokens of the draft vocabulary, None without one
    (a separate model has rows for all tokens, whichever it drafts)."""
    axis = next((axis for key, axis in TOKENS.items() if name.endswith(key)), None)
    if axis is None or axis >= weight.dim() or weight.shape[axis] != ids_of(head).numel():
        return None
    return axis


def ids_of(head: Head) -> Tensor:
    """[Vd] int64 ascending target ids that `head` drafts, on the CPU."""
    ids = head.ids()
    if ids is not None:
        return ids.cpu()
    return torch.arange(_rows(head))


def ranked(counts: Tensor, ids: Tensor | None) -> Tensor:
    """[V] int64 to choose a draft vocabulary by: as `counts`, and the tokens `ids` that an older
    head drafts behind those that the data hold."""
    if ids is None:
        return counts
    found = counts * 2
    found[ids.to(counts.device)] += 1
    return found


def difference(old: Tensor, new: Tensor) -> tuple[list[int], list[int]]:
    """(tokens of `new` that `old` lacks, tokens of `old` that gave way), ascending."""
    before, after = set(old.tolist()), set(new.tolist())
    return sorted(after - before), sorted(before - after)


def exchanged(ids: Tensor, words: list[int], gone: list[int], size: int) -> Tensor:
    """[Vd] int64 ascending: the draft vocabulary `ids` with the tokens `words` in place of
    `gone`. size: of the target's vocabulary.

    Raises UserError for lists that are no such exchange."""
    before = set(ids.tolist())
    sound = (
        len(words) == len(gone) == len({*words})
        and before.issuperset(gone)
        and before.isdisjoint(words)
        and all(0 <= token < size for token in words)
    )
    if not sound or len({*gone}) != len(gone):
        raise UserError(
            "head.lora.base.words: no exchange of tokens of the frozen head's draft vocabulary"
        )
    return torch.tensor(sorted((before - {*gone}) | {*words}), dtype=torch.int64)


@torch.no_grad()
def with_words(head: Head, ids: Tensor, target: Target) -> None:
    """Let `head` draft the tokens `ids` ([Vd] int64 ascending, as many as it drafts now).

    Raises UserError where a fresh head like it cannot be made for the target."""
    old = ids_of(head)
    spot = vocab.places(old, ids)
    new = (spot < 0).nonzero()[:, 0].to(target.device)
    if not new.numel():
        return
    fresh = _fresh(head, ids, target)
    theirs = dict(fresh.named_parameters())
    spot = spot.clamp(min=0).to(target.device)
    for name, weight in head.named_parameters():
        axis = axis_of(name, weight, head)
        if axis is None:
            continue
        moved = weight.index_select(axis, spot)
        given = theirs[name].index_select(axis, new).to(moved.dtype)
        weight.copy_(moved.index_copy_(axis, new, given))
    head.d2t, head._rows = fresh.d2t, None


def _fresh(head: Head, ids: Tensor, target: Target) -> Head:
    """A head with the keys of `head` that drafts the tokens `ids`."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64).index_fill_(0, ids.cpu(), 1)
    with torch.random.fork_rng([]):  # what is random in it is not looked at
        return type(head).for_target(target, head.cfg, counts)


def _rows(head: Head) -> int:
    """Tokens of a head that drafts the whole vocabulary: rows of the weights that have one for
    each."""
    for name, weight in head.named_parameters():
        for key, axis in TOKENS.items():
            if name.endswith(key):
                return weight.shape[axis]
    return 0
