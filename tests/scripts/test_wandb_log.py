"""What a report gives to wandb, by a stand-in for the package (tests/test_network.py has
the library itself)."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from outrider.scripts import evaluate
from tests.helpers.commands import code_of
from tests.helpers.training import TINY


def test_an_evaluation_shows_scores_and_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = MagicMock()
    run = wandb.init.return_value.__enter__.return_value
    run.summary = {}
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    out, prompts = tmp_path / "report", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "category": "a", "turns": ["abc abc abc"]}\n')
    keys = [f"prompts={prompts}", f"out={out}", "drafters=[none,ngram]", "target=tiny"]
    keys += [*(f"target.{k}={v}" for k, v in TINY.items()), "dtype=float32", "device=cpu"]
    keys += ["max_new_tokens=20", "quiet=true", "parity=0", "wandb=offline"]
    assert code_of(evaluate.main, *keys) == 0
    (line,) = run.log.call_args.args
    assert line["eval/drafters"] is wandb.Table.return_value and len(line) == 5
    drafters = [label for _, label, *_ in wandb.Table.call_args.kwargs["data"]]
    assert drafters == ["none", "ngram"]
    assert "speed/none/T=0/tokens_per_second" in run.summary
    assert run.summary["eval/none/T=0/accepted_length"] == 1


def test_trouble_with_wandb_costs_a_report_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not its exit code, and not what was measured for hours."""
    from outrider.scripts.reports.wandb_log import to_wandb

    monkeypatch.setitem(sys.modules, "wandb", None)
    to_wandb({"settings": {}}, tmp_path, "online", "p")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wandb") and line.endswith(f"the report is in {tmp_path}")
