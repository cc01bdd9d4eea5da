"""How long the steps wait for a save that is written beside them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.chats import chats

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
    included. Written in its place, with async_save=false, a save once took 10 % of a step.
    """
    data = chats(tmp_path / "data.jsonl", rows=128, times=40)
    out = tmp_path / "run"
    args = [
        "target=smollm2",
        "head=eagle3",
        f"data.path={data}",
        "data.cache=false",
        "batch_size=8",
        f"steps={4 * EVERY}",
        f"save_every={EVERY}",
        f"log_every={EVERY}",
        f"out_dir={out}",
        "eval.every=0",
        "eval.parity=0",
    ]
    subprocess.run(
        [sys.executable, str(ROOT / "train" / "eagle.py"), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    shares = waited(out)
    middle = statistics.median(shares)
    assert middle <= 0.05 and len(shares) == 3, shares
