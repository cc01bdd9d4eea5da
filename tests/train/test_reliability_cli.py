"""The same faults through the real command lines: `accelerate launch`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from outrider.heads.registry import head_class
from outrider.train import checkpoint as disk
from outrider.train.loop import fit
from tests.helpers.faults import ROOT, finish, outcome
from tests.helpers.training import chats, overrides, run_config

LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes", "2")
ENV = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def plain(data: Path, out: Path, *keys: str) -> None:
    cfg = run_config(data, out, *keys)
    fit(cfg, head_class(cfg.head.kind))


def start(data: Path, out: Path, *launcher: str, keys: tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, "train/medusa.py", *overrides(data, out, *keys)],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(out: Path, step: int) -> None:
    """Wait until a run in `out` has reached a step."""
    deadline, metrics = time.monotonic() + 240, out / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert time.monotonic() < deadline, out
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, False), (signal.SIGINT, True)],
)
def test_accelerate_trains_with_the_processes_asked_for_and_a_signal_saves_them(
    number: signal.Signals, to_all: bool, tmp_path: Path
) -> None:
    """Two, on a machine without two GPUs. to_all: whether the process group gets the signal."""
    data, keys = chats(tmp_path / "data.jsonl"), ("steps=400", "save_every=0", "log_every=1")
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert finish(2, partial(plain, data, whole, *keys), tmp_path / "said") == [0, 0]

    parent = start(data, out, *LAUNCH, keys=keys)
    until(out, 20)
    (os.killpg if to_all else os.kill)(parent.pid, number)
    said = parent.communicate(timeout=60)[1]  # the pipe closes when the last process has ended
    newest, problems = disk.newest(out)
    assert "over 2 rank(s)" in said and newest is not None and not problems
    assert 20 <= disk.step_of(newest) < 400
    assert start(data, out, *LAUNCH, keys=keys).wait(300) == 0
    assert outcome(out, 400) == outcome(whole, 400)


@pytest.mark.parametrize(
    ("more", "keys", "wanted"),
    [
        ((), ("data.path=none.jsonl",), "data.path: no such file"),
        (("--gradient_accumulation_steps", "4"), (), "accelerate's settings: gradient_acc"),
        (("--multi_gpu", "--num_machines", "1"), ("batch_size=7",), "batch_size: 7 "),
    ],
)
def test_a_mistake_under_accelerate_is_one_line(
    more: tuple[str, ...], keys: tuple[str, ...], wanted: str, tmp_path: Path
) -> None:
    """Also where accelerate itself is the launcher of several processes, as with GPUs."""
    data = chats(tmp_path / "data.jsonl")
    child = start(data, tmp_path / "run", *LAUNCH, *more, keys=keys)
    said = child.communicate(timeout=100)[1].splitlines()
    assert child.returncode and said[-1].startswith(f"error: {wanted}"), said
    assert sum("rror" in line for line in said) == 1, said
