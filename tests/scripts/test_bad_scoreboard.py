"""A scoreboard with everything wrong that can be: each mistake is told in words, the rest is
scored all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.heads import head_class, save_head
from outrider.scripts import evaluate
from outrider.scripts.reports import score_table
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


def test_everything_else_is_scored(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluate,
        "write",
        lambda report, lines, out: (out / "r.json").write_text(json.dumps(report)),
    )
    target = load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")  # type: ignore[arg-type]
    prompts = tmp_path / "p.jsonl"
    rows = [
        {"question_id": 1, "category": "chat", "turns": ["ab ab ab"]},
        {"prompt": "abc", "category": "chat"},
        {
            "id": "mute",
            "messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}],
        },
        {"question_id": 3, "category": "once", "turns": ["x = x"]},
    ]
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
    big = folder(tmp_path / "big", layers=4)
    odd = folder(tmp_path / "odd", add="<real>", layers=1, vocab=261)
    bare = folder(tmp_path / "bare", weights=False, layers=1)
    empty = head_without_weights(tmp_path / "empty", target)
    (tmp_path / "cut").mkdir()
    requested = ["ngram", f"{big}@chain", f"{odd}@chain", f"{bare}@chain", f"{empty}@tree"]
    requested += [f"{tmp_path}/cut@chain", f"{tmp_path}/absent@chain"]
    code = evaluated(
        f"prompts={prompts}", f"out={tmp_path}/out", f"candidates=[{','.join(requested)}]"
    )
    assert code == evaluate.SKIPPED
    report, shown = json.loads((tmp_path / "out" / "r.json").read_text()), capsys.readouterr()
    assert [r["label"] for r in report["drafters"]] == ["none", "ngram", "big@chain"], (
        "the others are scored"
    )
    reasons = {s["name"]: s["reason"] for s in report["skipped"]}
    message = {
        f"{odd}@chain": "<real>",
        f"{bare}@chain": "safetensors",
        f"{empty}@tree": "head.safetensors",
        f"{tmp_path}/cut@chain": "cut",
        f"{tmp_path}/absent@chain": "absent",
        "p.jsonl:3": "no user turn",
    }
    assert reasons.keys() == message.keys(), reasons
    for name, word in message.items():
        reason = reasons[name]
        assert word in reason and "\n" not in reason and "Traceback" not in reason, reason
        assert ";" in reason, f"{reason}: says no way out"
        assert name in shown.out
    notes = score_table.notes(report)
    limit = next(r["break_even"] for r in report["drafters"] if r["label"] == "big@chain")
    assert limit > 1 and any(
        "big@chain is no smaller than its target" in n and f"{limit:.2f}" in n for n in notes
    )
    assert any("Seen once, so without an interval: once." in n for n in notes)
    for row in report["drafters"]:
        once, often = row["by_category"]["once"], row["by_category"]["chat"]
        for cell in (once["accepted_length"], once["speedup"]):
            assert cell["low"] is None and cell["high"] is None and "[" not in interval(cell)
        assert often["speedup"]["low"] is not None
    assert report["settings"]["num_prompts"] == 3
    assert "warning: " in shown.err and "break-even" in shown.err


def test_a_file_without_a_prompt_ends_it_in_one_line(tmp_path: Path, capsys: Any) -> None:
    for text, words in (("\n \n", "the file holds no prompt"), ("{broken\n", "p.jsonl:1: is not")):
        (tmp_path / "p.jsonl").write_text(text)
        assert evaluated(f"prompts={tmp_path}/p.jsonl", f"out={tmp_path}/out") == 2
        shown = capsys.readouterr().err
        assert words in shown and shown.count("\n") == 1 and not (tmp_path / "out").exists()
