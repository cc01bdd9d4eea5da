"""Words that are none of ours and what to say of them: names that left with version 0.3
(conf/words/left.yaml, kept for one release), and what other trainers and engines call a key
(conf/words/synonyms.yaml); and the keys of ours that matter most (conf/words/usual.yaml)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

LAST = "0.2 (commit 9286df1b)"  # the last version that has all of it


def _table(name: str) -> Any:
    path = Path(__file__).with_name("words") / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


LEFT, _theirs = _table("left"), _table("synonyms")
USUAL: list[str] = _table("usual")["usual"].split()
CURES = {name: ours.split("|") for ours, names in _theirs["ours"].items() for name in names.split()}
REASONS = {name: why for why, names in _theirs["none"].items() for name in names.split()}


def left(section: str, name: str) -> str:
    """Return the one line about a name that left, "" for another. section: of left.yaml."""
    if name not in LEFT[section]:
        return ""
    fix = f"use {LEFT[section][name]}" if LEFT[section][name] else "leave it out"
    return f"{name}: left in 0.3; {fix}; {LAST} is the last that has it"


def synonym(key: str, known: Collection[str]) -> str:
    """Return what to say of a key that a command lacks and others know; "" for no word of theirs.
    known: the command's own keys."""
    for name in (key.replace(".", "_"), key.rpartition(".")[2]):
        for cure in CURES.get(name, []):
            if {word.partition("=")[0] for word in cure.split()} <= {*known}:
                return f"did you mean {cure}?"
        if name in REASONS:
            return REASONS[name]
        if name in CURES:
            return f"{CURES[name][0]} is that, in commands and heads that have it"
    return ""
