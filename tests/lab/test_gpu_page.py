"""The table of what one GPU measured, from JSON of different runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.scripts.lab.pages import gpu

FIRST: dict[str, Any] = {
    "command": "python scripts/doctor.py first_gpu",
    "environment": {"gpu": "Some GPU", "versions": {"torch": "2.13.0"}, "commit": "0123"},
    "kernels": {"compared": []},
    "training": {"tokens_per_second": 1000.0, "share_target": 0.25, "share_head": 0.75},
    "memory": {"predicted_bytes": 2e9, "measured_bytes": 2.1e9},
    "confirmed": ["kernels"],
}


def written(results: Path, **files: dict[str, Any]) -> str:
    for name, found in files.items():
        (results / f"{name}.json").write_text(json.dumps(found))
    return gpu.text(results)


def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    assert gpu.text(tmp_path) == "Not measured yet."


def test_a_rate_and_passes_stand_where_they_were_measured(tmp_path: Path) -> None:
    bare = written(tmp_path, first_gpu=FIRST)
    assert "1,000 tokens/s (25% of the time the target" in bare
    assert "TFLOP/s" not in bare and "CUDA graph" not in bare
    training = {**FIRST["training"], "tflops_per_device": 273.4}
    passes = {"1 tokens": {"modules": 17.6, "flat": 11.0, "graph": 1.87}, "context": 512}
    whole = written(tmp_path, first_gpu={**FIRST, "training": training, "passes": passes})
    assert "1,000 tokens/s, 273 TFLOP/s (25%" in whole
    assert "a pass of the shape of a 1B model over 1 token | 17.6 ms by modules, 11.0" in whole


def test_heads_say_what_else_the_gpu_did(tmp_path: Path) -> None:
    training = {"tokens_seen": 2e6, "train_seconds": 20.0}
    report = {"drafters": [{"training": None}, {"training": training}]}
    text = written(tmp_path, first_gpu=FIRST, **{"gpu-t0": report, "qwen25-gpu-t0": report})
    assert "SmolLM2-135M, beside other work | 2.0 million tokens in 20 s, 100,000 a second" in text
    assert "Qwen2.5-Coder-1.5B | 2.0 million" in text
