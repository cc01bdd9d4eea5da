"""How long the steps wait for a save: beside the training against in its place."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.lab.pages.reliability import record
from tests.helpers.training import chats

ROOT = Path(__file__).resolve().parents[2]
EVERY = 4


def waited(out: Path) -> list[float]:
    """Seconds waited for a save over the seconds of one step, for each save that had steps
    behind it.
    """
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shares = [line["share_save"] for line in lines if "share_save" in line][
        1:
    ]  # before the first line nothing is due
    return [share / (1 - share) * EVERY for share in shares]


@pytest.mark.slow
def test_a_step_waits_at_most_5_percent_of_itself_for_a_save(tmp_path: Path) -> None:
    """EAGLE-3 on SmolLM2, on the GPU where there is one: its events time the device, copies
    included.
    """
    data = tmp_path / "data.jsonl"
    chats(tmp_path / "short.jsonl", 128)
    rows = [
        json.loads(line)["messages"] for line in (tmp_path / "short.jsonl").read_text().splitlines()
    ]
    data.write_text(
        "".join(
            json.dumps({"messages": [{**m, "content": m["content"] * 40} for m in row]}) + "\n"
            for row in rows
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found: dict[str, list[float]] = {}
    for name, beside in (("beside", "true"), ("in place", "false")):
        out = tmp_path / beside
        args = [
            "target=smollm2",
            "head=eagle3",
            f"data.path={data}",
            "data.cache=false",
            "batch_size=8",
            "steps=20",
            f"save_every={EVERY}",
            f"log_every={EVERY}",
            f"async_save={beside}",
            f"out_dir={out}",
            "eval.every=0",
            "eval.parity=0",
        ]
        subprocess.run(
            [sys.executable, str(ROOT / "train" / "eagle.py"), *args],
            env=env,
            check=True,
            capture_output=True,
        )
        found[name] = waited(out)
        shutil.rmtree(out)
    where = "GPU" if torch.cuda.is_available() else "CPU"
    middle = {name: statistics.median(shares) for name, shares in found.items()}
    met = middle["beside"] <= 0.05
    record(
        "save-stall",
        what=f"what a step waits for a checkpoint (SmolLM2, EAGLE-3, {where})",
        met=met,
        bar=0.05,
        result=f"{middle['beside']:.1%} of a step; written in its place {middle['in place']:.0%}",
        waited=found,
    )
    assert met and all(len(shares) == 4 for shares in found.values()), found
