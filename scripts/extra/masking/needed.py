"""What every match of a pattern holds: a text without it needs no search.

`needed` reads that out of the pattern itself, so that it also holds for the next version of a
library. What it does not know counts as found, so that it loses nothing: letters are compared as
`re.IGNORECASE` does, whether the pattern ignores case or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

# What is an ASCII letter to re.IGNORECASE and does not become it by str.lower.
ALSO = {"\u0130": "i", "\u0131": "i", "\u017f": "s"}


def folded(text: str) -> str:
    """A text as `needed` spells what it has to hold."""
    if not text.isascii():
        for sign, letter in ALSO.items():
            text = text.replace(sign, letter)
    return text.lower()


Needs = tuple[tuple[tuple[str, ...], ...], ...]  # one pattern or another: every choice: a piece


def needed(*patterns: re.Pattern[str]) -> Needs:
    """What a text must hold for one of the patterns to be found, for `may_match`."""
    found = []
    for pattern in patterns:
        choices = set(_pieces(parser.parse(pattern.pattern, pattern.flags)))
        useful = [c for c in choices if min(map(len, c)) > 1 or not c[0].isalnum()]
        found.append(tuple(sorted(useful, key=lambda c: -min(map(len, c)))))
    return tuple(found)


def may_match(needs: Needs, text: str) -> bool:
    """Whether a pattern of these needs may be found in a folded text."""
    return any(
        all(any(piece in text for piece in choice) for choice in choices) for choices in needs
    )


def _best(choices: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The choice whose shortest piece is the longest: it stands in the fewest texts."""
    return max(choices, key=lambda pieces: (min(map(len, pieces)), -len(pieces)), default=())


def _pieces(tree: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, ...]]:
    """Choices of pieces, each of which alone is necessary."""
    run = ""
    for operator, value in tree:
        if str(operator) == "LITERAL" and value < 128:
            run += chr(value).lower()
            continue
        if run:
            yield (run,)
        run = ""
        match str(operator):
            case "SUBPATTERN":
                yield from _pieces(value[3])
            case "ATOMIC_GROUP":
                yield from _pieces(value)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT" if value[0]:
                yield from _pieces(value[2])
            case "BRANCH":
                ways = [_best(_pieces(way)) for way in value[1]]
                if all(ways):
                    yield tuple(sorted({piece for way in ways for piece in way}))
    if run:
        yield (run,)
