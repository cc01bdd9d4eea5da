"""Do two tokenizers mean the same? A draft model's tokens are the target's tokens, so ids must
agree on any text.

`compare` asks in this order and stops at the first difference, which it names: token-to-id
mapping, special tokens, encodings of hard strings, decodings. What does not matter for
drafting is no difference: a vocabulary padded to a multiple (more rows in the model than
tokens, or placeholder tokens at its end), another chat template, another padding side, another
choice of which special token ends a turn (the target's decides).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

# Texts on which tokenizers that share a vocabulary still part, by what they test.
HARD: dict[str, tuple[str, ...]] = {
    "plain text": ("Hello world", "The rider's horse, isn't it?", "x=1;y+=2"),
    "the empty text": ("",),
    "a run of spaces": (
        " ",
        "  ",
        "a    b",
        "\t\tx",
        "trailing   ",
        "\n\n\n",
        " \n \n",
        "a\r\nb",
        "        return",
    ),
    "digits": ("1234567890", "3.14159", "2026-11-21", "1,000,000", "0x7fff"),
    "unicode": (
        "Größe, naïve, Übung",
        "Ελληνικά",
        "Привет, мир",
        "漢字かな交じり文",
        "한국어",
        "ภาษาไทย",
        "हिन्दी",
    ),
    "emoji": ("🙂", "👩‍👩‍👧‍👦", "🇺🇳", "👍🏽", "❤️"),
    "right-to-left text": ("שלום עולם", "مرحبا بالعالم", "abc \u202eשלום\u202c def"),
    "control characters": (
        "\x00",
        "a\x07b",
        "\x1b[31mred",
        "\u200b",
        "\ufeffbom",
        "\u2028",
        "\x7f",
    ),
    "normalisation": (
        "é",
        "e\u0301",
        "ﬁ",
        "ｆｕｌｌ",
        "Å\u212b",
        "①",
        "\u00a0",
        "HELLO hello",
        "ß ẞ",
    ),
    "text that looks like a special token": (
        "<|im_end|>",
        "<|endoftext|>",
        "</s>",
        "<s>",
        "[INST]",
        "<unk>",
    ),
}
PLACEHOLDER = re.compile(r"reserved|unused|extra|\bpad|dummy|placeholder|<0x", re.IGNORECASE)


@dataclass(frozen=True)
class TokenizerMatch:
    """compatible: ids mean the same. reason: the first difference, empty when there is none.
    notes: differences that do no harm."""

    compatible: bool
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def compare(
    target: Tokenizer,
    draft: Tokenizer,
    target_rows: int | None = None,
    draft_rows: int | None = None,
) -> TokenizerMatch:
    """Compare the tokenizers of a target and a draft.

    target_rows, draft_rows: rows of the models' embeddings, which may exceed the tokens
        (padding) but not fall short.
    """
    notes: list[str] = []
    reason = (
        _vocabulary(target, draft, notes)
        or _rows(target, draft, target_rows, draft_rows, notes)
        or _special(target, draft, notes)
        or _texts(target, draft)
    )
    return TokenizerMatch(not reason, reason, notes)


def _vocabulary(target: Tokenizer, draft: Tokenizer, notes: list[str]) -> str:
    theirs, mine = target.get_vocab(), draft.get_vocab()
    if theirs == mine:
        return ""
    by_id = {i: t for t, i in mine.items()}
    for token, number in sorted(theirs.items(), key=lambda item: item[1]):
        if token in mine and mine[token] != number:
            return f"token {token!r} has id {number} in the target and {mine[token]} in the draft"
        if (
            number in by_id
            and by_id[number] != token
            and not (_idle(token) and _idle(by_id[number]))
        ):
            return f"id {number} is {token!r} in the target and {by_id[number]!r} in the draft"
    for name, some, other in (("target", theirs, mine), ("draft", mine, theirs)):
        extra = sorted((i, t) for t, i in some.items() if t not in other)
        real = [(i, t) for i, t in extra if not _idle(t)]
        if real:
            return (
                f"token {real[0][1]!r} (id {real[0][0]}) is known to the {name} only; "
                f"sizes are {len(theirs)} "
                f"(target) and {len(mine)} (draft)"
            )
        if extra:
            notes.append(f"{len(extra)} placeholder tokens of the {name} only")
    return ""


def _idle(token: str) -> bool:
    """Whether a token looks like one that only fills up the vocabulary."""
    return bool(PLACEHOLDER.search(token))


def _rows(
    target: Tokenizer,
    draft: Tokenizer,
    target_rows: int | None,
    draft_rows: int | None,
    notes: list[str],
) -> str:
    used = 1 + max((i for t, i in draft.get_vocab().items() if not _idle(t)), default=-1)
    if draft_rows is not None and draft_rows < used:
        return f"the draft has {draft_rows} embeddings for tokens up to id {used - 1}"
    if target_rows is not None and draft_rows is not None and target_rows != draft_rows:
        notes.append(
            f"vocabularies are padded differently: {target_rows} rows (target), "
            f"{draft_rows} (draft)"
        )
    return ""


def _special(target: Tokenizer, draft: Tokenizer, notes: list[str]) -> str:
    theirs, mine = specials(target), specials(draft)
    for token in sorted(set(theirs) ^ set(mine), key=lambda t: theirs.get(t, mine.get(t, 0))):
        if _idle(token):
            continue
        where = "target" if token in theirs else "draft"
        if (token in target.get_vocab()) != (token in draft.get_vocab()):
            return f"special token {token!r} is known to the {where} only"
        notes.append(f"{token!r} is a special token of the {where} only")
    for role in ("bos", "eos", "unk", "pad"):
        ids = [getattr(t, f"{role}_token_id", None) for t in (target, draft)]
        if ids[0] != ids[1]:
            notes.append(
                f"{role} token is {ids[0]} (target) and {ids[1]} (draft); the target's counts"
            )
    return ""


def specials(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens and their ids, those without a role among them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(t): int(i) for i, t in added.items() if getattr(t, "special", True)}


def _texts(target: Tokenizer, draft: Tokenizer) -> str:
    for what, texts in HARD.items():
        for text in texts:
            a, b = (_encode(t, text) for t in (target, draft))
            if a != b:
                return (
                    f"{what}: {text!r} is encoded as {_show(a)} by the target and {_show(b)} by "
                    "the draft"
                )
            c, d = (t.decode(a) for t in (target, draft))
            if c != d:
                return (
                    f"{what}: {_show(a)} is decoded as {c!r} by the target and {d!r} by the draft"
                )
    names = [t for t in specials(target) if t in draft.get_vocab()]
    for token in names[:64]:
        text = f"a{token}b"
        a, b = (_encode(t, text) for t in (target, draft))
        if a != b:
            return (
                f"special token {token!r} in a text: {_show(a)} by the target and {_show(b)} "
                "by the draft"
            )
    return ""


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _show(ids: list[int], most: int = 8) -> str:
    return str(ids) if len(ids) <= most else f"{ids[:most]}..."
