"""The words of a command line as people type them: lists that a space parted, keys with dashes."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Hydra's own; all other words are KEY=VALUE.
FLAGS = frozenset(
    [
        "-h",
        "--help",
        "--hydra-help",
        "--version",
        "-c",
        "--cfg",
        "--resolve",
        "-p",
        "--package",
        "-r",
        "--run",
        "-m",
        "--multirun",
        "-sc",
        "--shell-completion",
        "-cp",
        "--config-path",
        "-cn",
        "--config-name",
        "-cd",
        "--config-dir",
        "--experimental-rerun",
        "-i",
        "--info",
    ]
)
KEYED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def joined(words: Sequence[str]) -> list[str]:
    """The words, where those of a list that a space parted are one: `drafters=[none,` and `ngram]`
    are `drafters=[none, ngram]`. A list that never closes, or in which another key begins, stays
    as it is."""
    found, at = [], 0
    while at < len(words):
        end = _end(words, at)
        found.append(" ".join(words[at:end]))
        at = end
    return found


def _end(words: Sequence[str], at: int) -> int:
    """Behind the last word of the list that begins at `at`."""
    left = _open(words[at])
    for end in range(at + 1, len(words)):
        if left <= 0 or KEYED.match(words[end]):
            break
        left += _open(words[end])
        if left == 0:
            return end + 1
    return at + 1


def _open(word: str) -> int:
    """Brackets that `word` opens and does not close."""
    plain = QUOTED.sub("", word)
    return sum(plain.count(mark) for mark in "[{") - sum(plain.count(mark) for mark in "]}")


def undashed(flag: str, after: Sequence[str]) -> tuple[str, str]:
    """(key, value) that `--max-new-tokens 64` and `--max-new-tokens=64` mean; the value is "" where
    there is none. after: the next word, where there is one."""
    key, equals, value = flag.lstrip("-").partition("=")
    if not equals and after and not after[0].startswith("-") and not KEYED.match(after[0]):
        value = after[0]
    return key.replace("-", "_"), value
