"""scripts/bench.py on the tiny target: every bench runs, entries merge, each says where it
comes from.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from decode.models.load import TargetConfig, load_target
from heads import save_head
from heads.small_lm.config import SmallLMConfig
from heads.small_lm.head import SmallLM
from scripts import bench


def run(out: Path, *overrides: str) -> int:
    small = [
        "num_prompts=2",
        "max_new_tokens=4",
        "rounds=3",
        "batch_sizes=[1,2]",
        "context=8",
        "device=cpu",
    ]
    with pytest.raises(SystemExit) as stop:
        bench.main(["target=tiny", f"out={out}", *small, *overrides])
    return int(stop.value.code or 0)


def test_every_bench_runs_and_entries_merge(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    target = load_target(TargetConfig(kind="tiny"), "bfloat16", "cpu")
    head = SmallLM.for_target(target, SmallLMConfig(from_target_layers=1, depth=2))
    save_head(head, tmp_path / "draft/head", target.identity)
    for name in bench.BENCHES:
        long = (
            ["max_new_tokens=10"] if "assisted" in name else []
        )  # transformers drafts in its prefill already
        assert run(out, f"only=[{name}]", f"draft={tmp_path}/draft", *long) == 0
    found = json.loads(out.read_text())
    assert list(found) == list(bench.BENCHES)
    for entry in found.values():
        assert entry["about"] and entry["command"]
        assert entry["environment"]["commit"] and entry["environment"]["threads"]
        assert (
            "rows" in entry
            or 0 < entry["ratio"]["low"] <= entry["ratio"]["mean"] <= entry["ratio"]["high"]
        )
    assert [r["batch_size"] for r in found["batch_throughput"]["rows"]] == [1, 2]


def test_a_bench_without_its_draft_is_skipped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {
        k: v for k, v in bench.BENCHES.items() if k in ("draft_vs_hf_assisted_t0", "tree_score")
    }
    monkeypatch.setattr(bench, "BENCHES", kept)
    assert run(tmp_path / "b.json", f"draft={tmp_path}/none") == bench.SKIPPED
    assert "skipped: draft:" in capsys.readouterr().out and list(
        json.loads((tmp_path / "b.json").read_text())
    )


def test_an_unknown_bench_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "b.json", "only=[speed]") == 2
    assert "no bench speed; known: none_vs_hf_bf16" in capsys.readouterr().err


def test_the_ratio_is_of_medians_and_paired() -> None:
    base = np.array([1.0, 2.0, 4.0, 8.0, 100.0])
    assert bench.median_ratio(1.2 * base, base, 0) == pytest.approx(
        {"mean": 1.2, "low": 1.2, "high": 1.2}
    )
