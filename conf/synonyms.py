"""Synonyms: what other trainers and engines call a key (conf/words/synonyms.yaml), for all
commands."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

_table: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("words").joinpath("synonyms.yaml").read_text(encoding="utf-8")
)
CURES = {name: ours.split("|") for ours, names in _table["ours"].items() for name in names.split()}
REASONS = {name: why for why, names in _table["none"].items() for name in names.split()}


def said(key: str, known: Collection[str]) -> str:
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
