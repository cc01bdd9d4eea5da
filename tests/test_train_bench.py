"""The training benchmark runs, and its parts add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import chats, run_config
from train.bench import measure


def test_bench_parts_add_up(tmp_path: Path) -> None:
    cfg = run_config(chats(tmp_path / "d.jsonl"), tmp_path / "run", "steps=3", "micro_batch=2", "head.loss.soft=1")
    report = measure(cfg)
    assert 0.5 < sum(report["share_of_step"].values()) < 1.01
    assert 0 < report["ratio_low"] <= report["ratio"] <= report["ratio_high"]
    assert report["bottleneck"] in report["share_of_step"] and report["rounds"] == 3
    seconds = report["seconds"]
    assert seconds["step"] == pytest.approx(sum(seconds[k] for k in report["share_of_step"]), rel=0.5)
