"""What ranks have in common before anything is written, what a step reads, and what a rank leaves
behind when its run ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted
from outrider.train import checkpoint as disk
from outrider.train import loop, metrics, signals
from tests.helpers.faults import at_call, finish, train
from tests.helpers.training import run

SMALL = ("steps=8", "log_every=3", "save_every=2", "keep=9", "micro_batch=1")


def test_ranks_that_drift_apart_write_no_checkpoint(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "drift"

    def drifting() -> None:
        step = loop.train_step

        def bent(run: Any) -> int:
            requested = step(run)
            if os.environ["RANK"] == "1" and run.state.step == 5:
                with torch.no_grad():
                    run.head.block_bias.view(-1)[3] += 1e-6
            return requested

        loop.train_step = bent
        train(data, out, *SMALL)

    assert finish(2, drifting, out.with_suffix(".txt")) == [2, 2]
    said = " ".join(out.with_name("drift.txt.0").read_text().split())
    assert "rank 1 has other weights than rank 0 at step 6" in said
    assert [p.name for p in disk.checkpoints(out)] == ["step-4", "step-2"]


def test_ranks_clip_by_one_norm(data: Path, tmp_path: Path) -> None:
    """Two kinds of GPU may sum the same gradients to norms a bit apart: each rank clipping by
    its own, their weights would drift apart."""

    def apart() -> None:
        norm = torch.nn.utils.get_total_norm

        def other(*args: Any, **more: Any) -> torch.Tensor:
            return norm(*args, **more) * (1.0 + int(os.environ["RANK"]) / 8)

        torch.nn.utils.get_total_norm = other
        train(data, tmp_path / "clip", *SMALL, "optim.clip=0.01")

    assert finish(2, apart, tmp_path / "said") == [0, 0]


def test_a_step_waits_for_the_device_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many micro-batches it has: every read of a number on a GPU waits for all that
    was asked of it.
    """
    reads = []
    for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
        real = getattr(torch.Tensor, name)

        def read(self: Any, name: str = name, real: Any = real) -> Any:
            caller = sys._getframe(1).f_code
            if caller.co_filename in (loop.__file__, metrics.__file__):
                reads.append(name)
            return real(self)

        monkeypatch.setattr(torch.Tensor, name, read)
    run(data, tmp_path / "run", "steps=3", "micro_batch=1")
    assert reads == ["tolist"] * 3, "nothing else of the loop or of its passes"


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_process_group_is_gone(data: Path, tmp_path: Path) -> None:
    """Its threads hold Python's tensors. One that lets go of them while the interpreter ends
    aborts the process, whose work is done and saved: torchrun then reports a failure."""

    def action() -> None:
        try:
            at_call(2, sigterm, lambda: train(data, tmp_path / "run"))()
        except Interrupted as end:
            print(type(end).__name__)
        tasks = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
        print(
            "left:", *(t for t in (Path(name).read_text().strip() for name in tasks) if "gloo" in t)
        )

    assert finish(2, action, tmp_path / "said") == [0, 0]
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert [text.splitlines()[-1] for text in said] == ["left:"] * 2, said


def test_a_launcher_that_ends_the_ranks_stops_nothing_that_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sends SIGTERM to the others as soon as one has left, however long ago the user's was."""
    ended: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    for over in (True, False):
        with signals.Stop() as stop:
            stop.requested, stop.over, stop._heard = signal.SIGTERM, over, -2 * signals.ECHO
            sigterm()
        assert ended == ([] if over else [75])
