"""What a mistake in a command line is answered with: tests/conf/mistakes.yaml."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest
import yaml

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from tests.conf.test_config import ENTRIES
from tests.helpers.chats import chats

TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def cases(run: bool) -> list[object]:
    return [
        pytest.param(
            verb.get("runs", name),
            shlex.split(f"{verb['given']} {line}"),
            said,
            id=f"{name} {line}",
        )
        for name, verb in TABLE.items()
        for line, said in verb["mistakes"].items()
        if ("runs" in verb) == run
    ]


def check(line: str, said: str) -> None:
    assert "\n" not in line and len(line) < 300, line
    assert line.startswith(said[1:]) if said.startswith("^") else said in line, line


@pytest.mark.parametrize(("name", "words", "said"), cases(run=False))
def test_a_mistake_is_one_line(name: str, words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(name, ENTRIES[name], words)
    check(str(caught.value), said)


@pytest.mark.parametrize(("module", "words", "said"), cases(run=True))
def test_a_command_ends_with_one_line_and_has_written_nothing(
    module: str,
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    chats(tmp_path / "data.jsonl")
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "category": "x", "turns": ["Hi"]}\n')
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"outrider.{module}").main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("error: ") and "secret" not in err
    check(err.removeprefix("error: ").removesuffix("\n"), said)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert written - {".lock"} == {"data.jsonl", "prompts.jsonl"}
