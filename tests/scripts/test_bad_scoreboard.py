"""A scoreboard with what is wrong with its files: each mistake is told in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.heads.checkpoint import save_head
from outrider.heads.registry import head_class
from outrider.scripts import evaluate
from outrider.scripts.reports.table import interval
from tests.helpers.commands import code_of

SHAPE = {"layers": 2, "context": 256}


def folder(place: Path, weights: bool = True, add: str = "", **shape: Any) -> Path:
    """An ordinary model folder with the tiny target's tokenizer, `add` its own token."""
    made = load_target(TargetConfig(kind="tiny", **{**SHAPE, **shape}), "float32", "cpu")
    if add:
        made.tokenizer.add_tokens([add])
    made.model.save_pretrained(place)
    made.tokenizer.save_pretrained(place)
    if not weights:
        (place / "model.safetensors").unlink()
    return place


def head_without_weights(place: Path, target: Target) -> Path:
    kind = head_class("medusa")
    save_head(kind.for_target(target, kind.Config(draft_vocab=0)), place, target.identity)
    (place / "head.safetensors").unlink()
    return place


def evaluated(*overrides: str) -> int:
    shape = (f"target.{k}={v}" for k, v in SHAPE.items())
    small = ("dtype=float32", "device=cpu", "max_new_tokens=6", "quiet=true", "parity=0")
    return code_of(evaluate.main, "target=tiny", *shape, *small, *overrides)


def test_the_other_prompts_are_scored(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluate,
        "write",
        lambda report, lines, out: (out / "r.json").write_text(json.dumps(report)),
    )
    prompts = tmp_path / "p.jsonl"
    rows = [
        {"question_id": 1, "category": "chat", "turns": ["ab ab ab"]},
        {"prompt": "abc", "category": "chat"},
        {"id": "mute", "messages": [{"role": "system", "content": "s"}]},
        {"question_id": 3, "category": "once", "turns": ["x = x"]},
    ]
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
    code = evaluated(f"prompts={prompts}", f"out={tmp_path}/out", "drafters=[ngram]")
    assert code == evaluate.SKIPPED
    report, shown = json.loads((tmp_path / "out" / "r.json").read_text()), capsys.readouterr()
    assert [r["label"] for r in report["drafters"]] == ["none", "ngram"]
    (skipped,) = report["skipped"]
    assert skipped["name"] == "p.jsonl:3" and "no user turn" in skipped["reason"]
    assert "p.jsonl:3" in shown.out
    for row in report["drafters"]:
        once, often = row["by_category"]["once"], row["by_category"]["chat"]
        cell = once["accepted_length"]
        assert cell["low"] is None and cell["high"] is None and "[" not in interval(cell)
        assert (once["prompts"], often["prompts"]) == (1, 2)
    assert report["settings"]["num_prompts"] == 3


def test_every_drafter_that_does_not_load_is_named_in_a_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab ab"}\n')
    target = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")  # type: ignore[arg-type]
    odd = folder(tmp_path / "odd", add="<real>", layers=1, vocab=261)
    bare = folder(tmp_path / "bare", weights=False, layers=1)
    empty = head_without_weights(tmp_path / "empty", target)
    named = f"drafters=[{odd}@chain,{bare}@chain,{empty}@tree]"
    assert evaluated(f"prompts={tmp_path}/p.jsonl", f"out={tmp_path}/out", named) == 2
    shown = capsys.readouterr().err
    for word in ("<real>", "/bare", "head.safetensors"):
        assert word in shown
    assert "Traceback" not in shown and not (tmp_path / "out/report.json").exists()
