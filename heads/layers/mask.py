"""The token behind the mask of heads that draft all levels in one pass: engines take the mask's
embedding from the target's table, so that a head exports whose mask is a reserved token's.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.models.facts import specials
from outrider.decode.target import Target

# The names of tokens for nobody
RESERVED = re.compile(r"[<\[].*(reserved|unused|dummy|extra_id|placeholder)", re.IGNORECASE)


def chosen(target: Target, counts: Tensor | None) -> int:
    """Return a token that no text has: one that the tokenizer reserves by its name, else the
    first row of the target that it does not have, as published heads for Qwen3 take it, else
    its last special token without a role; -1 where there is none. counts: see `objection`."""
    if target.tokenizer is None:
        return -1
    words: dict[str, int] = target.tokenizer.get_vocab()
    named = sorted(number for text, number in words.items() if RESERVED.match(text))
    last = sorted(specials(target.tokenizer).values(), reverse=True)
    some = (*named, max(words.values()) + 1, *last)
    return next((token for token in some if not objection(token, target, counts)), -1)


def objection(token: int, target: Target, counts: Tensor | None) -> str:
    """Say why a token of `target` may stand in a text, "" where it does not: a special one
    without a role that no template writes, a word that is never written, or one that the
    tokenizer does not have. counts: [V] int64 of the data, or None."""
    tokenizer: Any = target.tokenizer
    if token >= target.vocab_size:
        return f"{token} is not in the target's vocabulary of {target.vocab_size}"
    named = {getattr(tokenizer, f"{n}_token_id", None) for n in ("bos", "eos", "unk", "pad")}
    ordinary = tokenizer is not None and token < len(tokenizer)
    special = {number: text for text, number in specials(tokenizer).items()} if ordinary else {}
    if token in special:
        ordinary = special[token] in str(tokenizer.chat_template)
    elif ordinary:
        word = tokenizer.decode([token])  # with a part of a letter: one that is written
        ordinary = "\ufffd" in word or token in tokenizer(word, add_special_tokens=False).input_ids
    if ordinary or token in named or token in target.eos_ids:
        return f"the tokenizer uses {token}"
    return f"the data has {token}" if counts is not None and int(counts[token]) else ""


def check(token: int, target: Target, counts: Tensor | None) -> None:
    """Raise UserError unless a token of `target` occurs in no text. counts: see `objection`."""
    if why := objection(token, target, counts):
        raise UserError(f"head.mask_token: {why}; give a reserved token that no text has, or -1")
