"""scripts/lab/bench.py on the tiny target: every bench runs, entries merge, each says where it
comes from.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.lab import bench
from tests.helpers.commands import code_of


def run(out: Path, *overrides: str) -> int:
    small = ["rounds=3", "context=8", "device=cpu"]
    return code_of(bench.main, "target=tiny", f"out={out}", *small, *overrides)


def test_every_bench_runs_and_entries_merge(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"id": "a", "turns": ["the only prompt"]}) + "\n")
    assert run(out, "only=[tree_score]") == 0
    assert run(out, "only=[verify_cost]", f"prompts={one}") == 0
    assert run(out, "only=[packed_pass]") == 0
    found = json.loads(out.read_text())
    assert [*found] == list(bench.BENCHES)
    for entry in found.values():
        assert entry["about"] and entry["command"]
        assert entry["environment"]["commit"] and entry["environment"]["threads"]
    ratio = found["tree_score"]["ratio"]
    assert 0 < ratio["low"] <= ratio["mean"] <= ratio["high"]
    assert set(found["packed_pass"]["passes"]) == {"0", "4", "8", "12", "16", "24"}
    assert all(row["share"] > 0 for row in found["verify_cost"]["rows"])


@pytest.mark.parametrize("wrong", ["only=[speed]", "rounds=1", "context=0"])
def test_mistakes_name_their_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert run(tmp_path / "b.json", wrong) == 2
    assert capsys.readouterr().err.startswith(f"error: {wrong.partition('=')[0]}: ")


def test_the_ratio_is_of_medians_and_paired() -> None:
    base = np.array([1.0, 2.0, 4.0, 8.0, 100.0])
    assert bench.median_ratio(1.2 * base, base, 0) == pytest.approx(
        {"mean": 1.2, "low": 1.2, "high": 1.2}
    )
