"""Reasoning inside the text of an answer: where a block of it opens, closes and ends.

Some servers keep a model's reasoning apart (`reasoning_content`), others leave it in the
answer's text between delimiters of the model's own. Templates treat the latter in every way
there is: they show it, cut it off, or put an empty block of their own before it."""

from __future__ import annotations

import re

PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
OPENING, CLOSING = zip(*PAIRS, strict=True)
DELIMITERS = re.compile("|".join(re.escape(word) for pair in PAIRS for word in pair))


def opens(text: str) -> bool:
    """Whether a text begins with a block."""
    return text.lstrip().startswith(OPENING)


def stays_open(text: str) -> bool:
    """Whether a text begins with a block that it does not close."""
    start = text.lstrip()
    return any(start.startswith(first) and last not in text for first, last in PAIRS)


def closes(text: str) -> bool:
    """Whether a block ends somewhere in a text."""
    return any(word in text for word in CLOSING)


def asks_inside(prompt: str) -> bool:
    """Whether the words that ask for an answer open a block: the answer begins inside it."""
    return prompt.rstrip().endswith(OPENING)


def ends_closed(text: str) -> bool:
    """Whether a block ends where a text does."""
    return text.rstrip().endswith(CLOSING)


def behind(prompt: str, answer: str) -> str:
    """An answer as it stands behind the words that asked for it: without the opening that is
    theirs already."""
    text = answer.lstrip()
    first = next((word for word in OPENING if text.startswith(word)), "")
    if not first or not prompt.rstrip().endswith(first):
        return answer
    rest = text.removeprefix(first)
    return rest.lstrip() if prompt[-1:].isspace() else rest


def pieces(text: str) -> list[str]:
    """The parts of a text between delimiters, blanks taken out; the last one is what stands
    behind all reasoning, "" where nothing does."""
    return ["".join(part.split()) for part in DELIMITERS.split(text)]
