"""The road of the README, each step by its command: the target answers, a head learns, the table,
the export, llama.cpp serves it, `check` asks the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.interop import DEEP, deep_target, target_gguf
from tests.scripts.test_check import llamacpp


@pytest.mark.needs_llamacpp
def test_from_questions_to_a_checked_server(tmp_path: Path) -> None:
    target = ["target=tiny", *(f"target.{key}={value}" for key, value in DEEP.items())]

    def outrider(*words: str) -> None:
        run = [sys.executable, "-c", "from outrider.scripts.cli import main; main()", *words]
        environment = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"

    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(16))
    )
    asked = [
        "prompts=mine.jsonl",
        "max_new_tokens=24",
        "max_cut=1",
        "max_failed=1",
        "out=data.jsonl",
    ]
    outrider("synthesize", *target, *asked)
    learned = ["steps=4", "batch_size=4", "dtype=float32", "out_dir=run", "eval.prompts=2"]
    outrider("train", "eagle3", *target, "data.path=data.jsonl", *learned)
    scored = ["drafters=[none,run@chain]", "num_prompts=2", "max_new_tokens=8", "out=report"]
    outrider("evaluate", *target, *scored, "dtype=float32")
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert [row["lossless"]["beyond_rounding"] for row in report["drafters"]] == [0, 0]

    file = target_gguf(tmp_path / "target.gguf", deep_target())
    outrider(
        *("export", *target, "drafter=run", "format=gguf"),
        *(f"tokenizer_from={file}", "out=export", "max_new_tokens=16"),
    )
    served = {"model": str(file), "draft": str(tmp_path / "export/draft.gguf")}
    with llamacpp(tmp_path, **served, method="EAGLE3", draft_tokens=3) as url:
        outrider("check", f"url={url}", "expected=export")  # 0: it serves what was trained
