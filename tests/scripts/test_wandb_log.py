"""What a report gives to wandb, by a stand-in for the package (tests/test_network.py has
the library itself)."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from outrider.scripts import evaluate
from tests.helpers.commands import code_of
from tests.helpers.training import TINY


class Wandb(types.ModuleType):
    """The module, a run of it, and its configuration."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.summary, self.lines = dict[str, Any](), list[Any]()
        self.config = types.SimpleNamespace(update=lambda *_, **__: None)

    def init(self, **keys: Any) -> Wandb:
        self.keys = keys
        return self

    def __enter__(self) -> Wandb:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def log(self, values: dict[str, Any], step: int = 0) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        pass

    def Image(self, path: str) -> str:
        return path

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_an_evaluation_shows_scores_and_the_best(tmp_path: Path, wandb: Wandb) -> None:
    out, prompts = tmp_path / "report", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "category": "a", "turns": ["abc abc abc"]}\n')
    keys = [f"prompts={prompts}", f"out={out}", "drafters=[none,ngram]", "target=tiny"]
    keys += [*(f"target.{k}={v}" for k, v in TINY.items()), "dtype=float32", "device=cpu"]
    keys += ["max_new_tokens=20", "quiet=true", "parity=0", "wandb=offline"]
    assert code_of(evaluate.main, *keys) == 0
    ((_, line),) = wandb.lines
    scores = line["eval/drafters"]
    assert [row["drafter"] for row in scores][0] == "none"
    assert "speed/none/T=0/tokens_per_second" in wandb.summary
    assert wandb.summary["eval/none/T=0/accepted_length"] == 1


def test_trouble_with_wandb_costs_a_report_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not its exit code, and not what was measured for hours."""
    from outrider.scripts.reports.wandb_log import to_wandb

    monkeypatch.setitem(sys.modules, "wandb", None)
    to_wandb({"settings": {}}, tmp_path, "online", "p")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wandb") and line.endswith(f"the report is in {tmp_path}")
