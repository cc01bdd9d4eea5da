"""A name that left is answered in one line that says so and what does its work now."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.conf import left
from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.heads.names import parse
from outrider.heads.registry import head_class
from outrider.scripts import cli
from outrider.train.resuming import check_meaning
from tests.conf.test_config import ENTRIES


@pytest.mark.parametrize("word", [*left.VERBS, *(f"train {kind}" for kind in left.KINDS)])
def test_a_verb_or_head_that_left(word: str) -> None:
    with pytest.raises(UserError) as caught:
        cli.speak(word.split())
    said = str(caught.value)
    assert word.split()[-1] in said and left.LAST in said and "\n" not in said


@pytest.mark.parametrize(
    "word", [*(f"{key}=1" for key in left.KEYS), "head.lora.rank=2", *left.CHOICES, *left.WORDS]
)
def test_a_key_or_option_that_left(word: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(
            "medusa",
            ENTRIES["medusa"],
            ["target=tiny", "data.path=x", "out_dir=y", "steps=1", word],
        )
    said = str(caught.value)
    assert said.startswith(f"{word.partition('=')[0]}") and "\n" not in said and left.LAST in said


def test_a_folder_with_a_head_of_a_kind_that_left() -> None:
    with pytest.raises(UserError) as caught:
        head_class("medusa2", "runs/x/head/head.json")
    said = str(caught.value)
    assert said.startswith("runs/x/head/head.json: medusa2") and left.LAST in said


@pytest.mark.parametrize("option", left.DRAFTS)
def test_an_option_of_a_drafter_that_left(option: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(f"ngram@chain:3@{option}")
    said = str(caught.value)
    assert said.startswith("drafters:") and f"@{option}" in said and left.LAST in said


def test_a_run_of_the_version_before_goes_on(tmp_path: Path) -> None:
    now = {"head.kind": "eagle3", "seed": 0}
    assert check_meaning({**now, "target.compile": "auto"}, now, tmp_path, {}) == []
    with pytest.raises(UserError) as caught:
        check_meaning({**now, "head.kind": "medusa2"}, now, tmp_path, {})
    assert "medusa2" in str(caught.value) and left.LAST in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "doctor first_gpu",
        "tune engine",
        "evaluate candidates=[a] target=tiny out=x",
        "chat monitor=warn",
        "train eagle3 head.draft_vocab_from=x target=tiny data.path=x out_dir=y steps=1",
        "synthesize logs=x target=tiny out=y",
    ],
)
def test_command_lines_of_the_version_before(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.speak(words.split())
    assert stop.value.code == 2 and left.LAST in capsys.readouterr().err
