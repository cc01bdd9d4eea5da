"""Texts that leave this machine name no folder of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# An absolute path: no part of an address, of a relative path or of a fraction.
ABSOLUTE = re.compile(r"(?<![\w.:/@~-])(?:~|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")


def without_places(text: str, known: Mapping[str, str]) -> str:
    """`text` with what `known` says in place of its keys, and the last name in place of every
    other absolute path of this machine."""
    for place in sorted(filter(None, known), key=len, reverse=True):
        text = text.replace(place, known[place])

    def bare(found: re.Match[str]) -> str:
        root = Path(found[0]).expanduser().parts[:2]
        return Path(found[0]).name if Path(*root).is_dir() else found[0]

    return ABSOLUTE.sub(bare, text)
