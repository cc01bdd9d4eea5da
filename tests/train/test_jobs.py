"""The training scripts: one mechanism, each with a help of its own."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from outrider.train.launcher import SAME
from tests.helpers.training import chats, overrides


def words(text: str) -> list[str]:
    """Without the backslashes and the breaks of a help that is as wide as the terminal."""
    return text.replace(" \\\n", " ").split()


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize(
    "name, key",
    [
        ("medusa", "head.heads"),
        ("hydra_heads", "head.prefix_layers"),
        ("eagle", "head.step_decay"),
        ("draft", "head.from_target_layers"),
        ("block", "head.anchors"),
    ],
)
def test_every_script_says_what_it_trains_and_its_keys(
    name: str,
    key: str,
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    script = importlib.import_module(f"outrider.train.{name}")
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    about = words(script.__doc__ or "-")
    assert words(said)[: len(about)] == about and f"train/{name}.py" in said
    assert " ".join(words(SAME)) in " ".join(words(said))
    assert f"\n  {key}=" in said and "\n  epochs=" in said
    assert script.main.config_name == name and script.main.schema.__name__.endswith("Run")


def test_a_script_trains(tmp_path: Path) -> None:
    script = importlib.import_module("outrider.train.medusa")
    data = chats(tmp_path / "data.jsonl")
    with pytest.raises(SystemExit) as end:
        script.main(overrides(data, tmp_path / "run", "steps=1"))
    assert end.value.code == 0 and (tmp_path / "run" / "head" / "head.json").is_file()
