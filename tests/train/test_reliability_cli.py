"""The same faults through the real command lines: python, torchrun with restarts, and signals
to torchrun and to `accelerate launch`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from outrider.heads import head_class
from outrider.train import checkpoint as disk
from outrider.train.loop import fit
from tests.helpers.faults import ROOT, finish, free_port, outcome
from tests.helpers.training import chats, overrides, run_config

STEPS = 60
SMALL = (f"steps={STEPS}", "save_every=1", "log_every=1", "micro_batch=1")
LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes", "2")
Child = subprocess.Popen[str]
ENV = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def plain(data: Path, out: Path, *keys: str) -> None:
    cfg = run_config(data, out, *SMALL, "save_every=0", *keys)
    fit(cfg, head_class(cfg.head.kind))


def start(data: Path, out: Path, *launcher: str, keys: tuple[str, ...] = ()) -> Child:
    line = [sys.executable, *launcher, "train/medusa.py", *overrides(data, out, *SMALL, *keys)]
    return subprocess.Popen(
        line,
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(out: Path, step: int, limit: float = 240.0) -> None:
    """Wait until a run in `out` has reached a step."""
    deadline, metrics = time.monotonic() + limit, out / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    raise TimeoutError(f"{out} did not reach step {step}")


def rank(parent: int, number: int) -> int:
    """Process id of a rank among the children of a launcher."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"\0RANK={number}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise LookupError(f"rank {number}")


@pytest.mark.slow
def test_real_commands_survive_kills_and_signals(tmp_path: Path) -> None:
    data, found = chats(tmp_path / "data.jsonl"), {}
    whole = {}
    for world in (1, 2):
        out = tmp_path / f"whole{world}"
        assert finish(world, partial(plain, data, out), out.with_suffix(".txt")) == [0] * world
        whole[world] = outcome(out, STEPS)
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port")

    out = tmp_path / "killed"
    first = start(data, out)
    until(out, 20)
    first.kill()
    first.communicate()
    assert start(data, out).wait(300) == 0
    found["python, kill -9"] = outcome(out, STEPS) == whole[1]

    out = tmp_path / "restarted"
    parent = start(data, out, *torchrun, str(free_port()), "--max-restarts", "2")
    until(out, 20)
    os.kill(rank(parent.pid, 1), signal.SIGKILL)
    parent.communicate(timeout=300)
    found["torchrun, rank 1 killed"] = parent.returncode == 0 and outcome(out, STEPS) == whole[2]

    out = tmp_path / "stopped"
    parent = start(data, out, *torchrun, str(free_port()))
    until(out, 20)
    parent.terminate()
    said = parent.communicate(timeout=300)[1]
    newest, problems = disk.newest(out)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = (
        newest is not None
        and not problems
        and disk.step_of(newest) == max(steps)
        and "stopped at step" in said
    )
    parent = start(data, out, *torchrun, str(free_port()))
    parent.communicate(timeout=300)
    found["torchrun, SIGTERM"] = kept and parent.returncode == 0 and outcome(out, STEPS) == whole[2]

    assert all(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGUSR1, False), (signal.SIGUSR1, True), (signal.SIGINT, True)],
)
def test_accelerate_trains_with_the_processes_asked_for_and_a_signal_saves_them(
    number: signal.Signals, to_all: bool, tmp_path: Path
) -> None:
    """Two, on a machine without two GPUs. to_all: whether the process group gets the signal."""
    data, steps = chats(tmp_path / "data.jsonl"), 400
    keys = (f"steps={steps}", "save_every=0")
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert finish(2, partial(plain, data, whole, *keys), tmp_path / "said") == [0, 0]

    parent = start(data, out, *LAUNCH, keys=keys)
    until(out, 20)
    (os.killpg if to_all else os.kill)(parent.pid, number)
    said = parent.communicate(timeout=60)[1]  # the pipe closes when the last process has ended
    newest, problems = disk.newest(out)
    assert "over 2 rank(s)" in said and newest is not None and not problems
    assert 20 <= disk.step_of(newest) < steps
    assert start(data, out, *LAUNCH, keys=keys).wait(300) == 0
    assert outcome(out, steps) == outcome(whole, steps)


@pytest.mark.slow
def test_a_mistake_under_accelerate_is_one_line(tmp_path: Path) -> None:
    child = start(tmp_path / "none.jsonl", tmp_path / "run", *LAUNCH)
    said = child.communicate(timeout=100)[1].splitlines()
    assert child.returncode and said[-1].startswith("error: data.path: no such file")
    assert sum("rror" in line for line in said) == 1
