"""Do two tokenizers mean the same? A draft model's tokens are the target's tokens, so ids must
agree on any text.

What does not matter for drafting is no difference: a vocabulary padded to a multiple (more rows
in the model than tokens, or placeholder tokens at its end), another chat template, another padding
side, another choice of which special token ends a turn (the target's decides).
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase as Tokenizer

from outrider.decode.models.facts import specials

# Texts on which tokenizers that share a vocabulary still part: plain text, spaces, digits, other
# scripts, emoji, control characters, what a normaliser changes, what looks like a special token.
HARD = (
    *("", "Hello world", "The rider's horse, isn't it?", "x=1;y+=2", " ", "  ", "a    b", "\t\tx"),
    *("trailing   ", "\n\n\n", " \n \n", "a\r\nb", "        return", "1234567890", "3.14159"),
    *("2026-11-21", "1,000,000", "0x7fff", "Größe, naïve, Übung", "Ελληνικά", "Привет, мир"),
    *("漢字かな交じり文", "한국어", "ภาษาไทย", "हिन्दी", "שלום עולם", "مرحبا بالعالم"),
    *("abc \u202eשלום\u202c def", "🙂", "👩‍👩‍👧‍👦", "🇺🇳", "👍🏽", "❤️", "\x00", "a\x07b"),
    *("\x1b[31mred", "\u200b", "\ufeffbom", "\u2028", "\x7f", "é", "e\u0301", "ﬁ", "ｆｕｌｌ"),
    *("Å\u212b", "①", "\u00a0", "HELLO hello", "ß ẞ", "<|im_end|>", "<|endoftext|>"),
    *("</s>", "<s>", "[INST]", "<unk>"),
)
PLACEHOLDER = re.compile(r"reserved|unused|extra|\bpad|dummy|placeholder|<0x", re.IGNORECASE)


def compare(target: Tokenizer, draft: Tokenizer, draft_rows: int | None = None) -> str:
    """Return the first difference between the tokenizers of a target and a draft, "" where
    ids mean the same: token-to-id mapping, encodings and decodings of hard strings, special
    tokens in a text.

    draft_rows: rows of the draft's embeddings, which may exceed its tokens but not fall short."""
    return _vocabulary(target, draft) or _rows(draft, draft_rows) or _texts(target, draft)


def _vocabulary(target: Tokenizer, draft: Tokenizer) -> str:
    theirs, mine = target.get_vocab(), draft.get_vocab()
    by_id = {i: t for t, i in mine.items()}
    for token, number in sorted(theirs.items(), key=lambda item: item[1]):
        if mine.get(token, number) != number:
            return f"token {token!r} has id {number} in the target and {mine[token]} in the draft"
        other = by_id.get(number, token)
        if other != token and not (_idle(token) and _idle(other)):
            return f"id {number} is {token!r} in the target and {other!r} in the draft"
    for name, some, known in (("target", theirs, mine), ("draft", mine, theirs)):
        more = min(((i, t) for t, i in some.items() if t not in known and not _idle(t)), default=())
        if more:
            return f"token {more[1]!r} (id {more[0]}) is known to the {name} only"
    return ""


def _idle(token: str) -> bool:
    """Return whether a token looks like one that only fills up the vocabulary."""
    return bool(PLACEHOLDER.search(token))


def _rows(draft: Tokenizer, rows: int | None) -> str:
    last = max((i for t, i in draft.get_vocab().items() if not _idle(t)), default=-1)
    short = rows is not None and rows <= last
    return f"the draft has {rows} embeddings for tokens up to id {last}" if short else ""


def _texts(target: Tokenizer, draft: Tokenizer) -> str:
    known = [token for token in specials(target) if token in draft.get_vocab()][:64]
    for text in (*HARD, *(f"a{token}b" for token in known)):
        a, b = (_encode(t, text) for t in (target, draft))
        if a != b:
            return f"the text {text!r} is {_show(a)} in the target and {_show(b)} in the draft"
        c, d = (t.decode(a) for t in (target, draft))
        if c != d:
            return f"{_show(a)} is decoded as {c!r} by the target and {d!r} by the draft"
    return ""


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _show(ids: list[int], most: int = 8) -> str:
    return str(ids) if len(ids) <= most else f"{ids[:most]}..."
