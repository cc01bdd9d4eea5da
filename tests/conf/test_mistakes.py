"""What a mistake in a command line is answered with: tests/conf/mistakes.yaml."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from outrider.conf import words as other
from outrider.conf.errors import UserError
from outrider.conf.help import shown
from outrider.conf.schema import compose
from outrider.conf.typed import keys, unknown_key
from tests.conf.test_config import ENTRIES
from tests.helpers.chats import chats
from tests.helpers.commands import code_of

TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def commands(run: bool) -> list[str]:
    """Entries of the table whose command is run, or whose keys are composed alone."""
    return [name for name, verb in TABLE.items() if ("runs" in verb) == run]


def mistakes(name: str) -> list[tuple[list[str], str]]:
    verb = TABLE[name]
    return [(shlex.split(f"{verb['given']} {line}"), s) for line, s in verb["mistakes"].items()]


def check(line: str, said: str) -> None:
    assert "\n" not in line and len(line) < 300, line
    assert line.startswith(said[1:]) if said.startswith("^") else said in line, line


@pytest.mark.parametrize("name", commands(run=False))
def test_a_mistake_is_one_line(name: str) -> None:
    for words, said in mistakes(name):
        with pytest.raises(UserError) as caught:
            compose(name, ENTRIES[name], words)
        check(str(caught.value), said)


@pytest.mark.parametrize("name", commands(run=True))
def test_a_command_ends_with_one_line_and_has_written_nothing(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    chats(tmp_path / "data.jsonl")
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "category": "x", "turns": ["Hi"]}\n')
    for words, said in mistakes(name):
        main = importlib.import_module(f"outrider.{TABLE[name]['runs']}").main
        code, err = code_of(main, *words), capsys.readouterr().err
        assert code == 2 and err.startswith("error: ") and "secret" not in err, words
        check(err.removeprefix("error: ").removesuffix("\n"), said)
        written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert written - {".lock"} == {"data.jsonl", "prompts.jsonl"}, words


def given(name: str) -> list[str]:
    """Words with which a command has nothing to complain of."""
    return shlex.split(TABLE[name]["given"])


@pytest.mark.parametrize("name", ["eagle", "evaluate"])
def test_what_others_call_a_key_is_answered_with_one_that_the_command_takes(name: str) -> None:
    made, known = compose(name, ENTRIES[name], given(name)), [*keys(ENTRIES[name])]
    found = (other.synonym(key, known) for key in other.CURES)
    cures = {said[13:-1] for said in found if said.startswith("did you mean ")}
    words = []
    for word in sorted(word for cure in cures for word in cure.split()):
        value = functools.reduce(getattr, word.partition("=")[0].split("."), made)
        plain = not dataclasses.is_dataclass(value) and value not in ("", None) and "=" not in word
        words += [f"{word}={shown(value)}"] if plain else [word] if "=" in word else []
    assert len(words) > 3
    compose(name, ENTRIES[name], [*given(name), *words, *["data.name=x"][: "data=hub" in words]])


def test_a_reason_that_names_a_key_names_one_that_there_is() -> None:
    for why in set(other.REASONS.values()):
        for word in re.findall(r"[a-z_.]+=\w+", why):
            name = "validate" if "validate" in why else "eagle"
            compose(name, ENTRIES[name], [*given("eagle"), word])
        for key in re.findall(r"(?:head|eval|optim|data)\.\w+|micro_batch|batch_size", why):
            assert key in [*keys(ENTRIES["eagle"])] or (Path("docs") / key).exists(), why


def test_no_key_of_hugging_face_is_taken_for_a_slip_of_another() -> None:
    from transformers import TrainingArguments

    known = [*keys(ENTRIES["eagle"])]
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)} - {*known}
    theirs -= {*other.CURES, *(key.rpartition(".")[2] for key in known)}
    said = [unknown_key(key, known) for key in theirs]
    assert not [line for line in said if "did you mean" in line]


ONE_MEANING = [
    ("chat", "drafters=[ngram]", "drafter=ngram"),
    ("serve", "drafter=ngram", "drafters=[ngram]"),
    ("evaluate", "drafters=none,ngram@chain:3", "drafters=[none,ngram@chain:3]"),
    ("evaluate", "temperature=0,1", "temperatures=[0,1]"),
    ("serve", "target=Qwen/Qwen3-8B", "target=hub target.name=Qwen/Qwen3-8B"),
]


def test_what_can_mean_one_thing_alone_is_taken(tmp_path: Path) -> None:
    for name, typed, meant in ONE_MEANING:
        words = [] if name == "chat" else given(name)
        here, there = ([*words, *line.split()] for line in (typed, meant))
        assert compose(name, ENTRIES[name], here) == compose(name, ENTRIES[name], there), typed
    for folder in ("a b", "k=v", "x,y", "p'q\"r", "é[1]", "~", "a\\b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        words = [f"target={tmp_path / folder}", "drafters=none", "out=o"]
        found = compose("evaluate", ENTRIES["evaluate"], words)
        assert found.target.path == str(tmp_path / folder)
