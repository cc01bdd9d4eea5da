"""A name that left is answered in one line that says so and what does its work now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.conf import words
from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.heads.names import parse
from outrider.heads.registry import head_class
from outrider.scripts import cli
from outrider.train.resuming import check_meaning
from tests.conf.test_config import ENTRIES


def answered(call: Callable[[], Any], begins: str = "") -> str:
    """The line about a name that left."""
    with pytest.raises(UserError) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(begins) and words.LAST in said and "\n" not in said, (begins, said)
    return said


def test_verbs_heads_and_options_of_drafters_that_left(tmp_path: Path) -> None:
    left = words.LEFT
    for word in (*left["verbs"], *(f"train {kind}" for kind in left["kinds"])):
        assert word.split()[-1] in answered(lambda word=word: cli.speak(word.split()))
    for option in left["drafts"]:
        said = answered(lambda option=option: parse(f"ngram@chain:3@{option}"), "drafters:")
        assert f"@{option}" in said
    card = "runs/x/head/head.json"
    answered(lambda: head_class("medusa2", card), f"{card}: medusa2")
    now = {"head.kind": "eagle3", "seed": 0}
    assert check_meaning({**now, "target.compile": "auto"}, now, tmp_path, {}) == []
    was = {**now, "head.kind": "medusa2"}
    assert "medusa2" in answered(lambda: check_meaning(was, now, tmp_path, {}))


def test_keys_and_options_that_left() -> None:
    given = ["target=tiny", "data.path=x", "out_dir=y", "steps=1"]
    keys = [f"{key}=1" for key in words.LEFT["keys"]]
    for word in (*keys, *words.LEFT["choices"], *words.LEFT["words"]):
        line, begins = [*given, word], word.partition("=")[0]
        answered(lambda line=line: compose("medusa", ENTRIES["medusa"], line), begins)
