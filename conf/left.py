"""Names that left with version 0.3 and what does their work now (conf/words/left.yaml): verbs,
keys, options and kinds of heads, kept for one release."""

from __future__ import annotations

from pathlib import Path

import yaml

SINCE = "0.3"
LAST = "0.2 (commit 9286df1b)"  # the last version that has all of it

_table: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("words").joinpath("left.yaml").read_text(encoding="utf-8")
)
VERBS, KINDS, CHOICES = _table["verbs"], _table["kinds"], _table["choices"]
WORDS, KEYS, DRAFTS = _table["words"], _table["keys"], _table["drafts"]


def line(name: str, instead: str) -> str:
    """Return the one line about a name that left. instead: what does its work, "" for nothing."""
    fix = f"use {instead}" if instead else "leave it out"
    return f"{name}: left in {SINCE}; {fix}; {LAST} is the last that has it"


def of_key(key: str) -> str:
    """Return the one line about a key that no command knows; "" where it, or its group, did not
    leave."""
    for name in (key, key.rpartition(".")[0]):
        if name in KEYS:
            return line(key, KEYS[name])
    return ""


def head(kind: str, where: str) -> str:
    """Return the one line about a head, or a run of one, that this version does not read; "" where
    it is not of a kind that left. where: the file or key that names the kind."""
    if kind not in KINDS:
        return ""
    return f"{where}: {kind} left in {SINCE}; {LAST} is the last that reads it; train {KINDS[kind]}"
