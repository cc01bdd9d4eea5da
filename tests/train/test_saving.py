"""Checkpoints: written beside the training from a snapshot, in an order that survives a power
cut; evaluations that are cut short."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import records
from outrider.heads import checkpoint as heads_checkpoint
from outrider.train import checkpoint as disk
from outrider.train import evaluation, loop, setup
from outrider.train.checkpoint import Snapshot
from outrider.train.measure import is_no_memory
from outrider.train.run import Run
from tests.helpers.faults import digest
from tests.helpers.training import run

SHORT = ("eval.every=3", "eval.prompts=3", "eval.max_new_tokens=6")


def snapshot(step: int) -> Snapshot:
    state = {"step": step, "best": {}, "seen": {}}
    return Snapshot(state, {"w": torch.ones(9)}, {"0.exp_avg": torch.ones(9)}, "medusa", {}, None)


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write waits until the run has made another update; what it holds is the step of
    its name.
    """
    steps = ("steps=7", "save_every=2", "keep=9")
    whole = run(data, tmp_path / "whole", *steps)
    made, save, step, reached = threading.Condition(), disk.write, loop.train_step, 0

    def stepping(run: Run) -> int:
        nonlocal reached
        requested = step(run)
        with made:
            reached = run.state.step
            made.notify_all()
        return requested

    def late(folder: Path, taken: Snapshot) -> Path:
        if taken.state["step"] < 7:
            with made:
                assert made.wait_for(lambda: reached > taken.state["step"], timeout=60)
        return save(folder, taken)

    monkeypatch.setattr(loop, "train_step", stepping)
    monkeypatch.setattr(disk, "write", late)
    out = run(data, tmp_path / "run", *steps)
    for name in ("step-2", "step-4", "step-6", "step-7"):
        for place in (out, whole):
            assert disk.damage(place / "checkpoints" / name) is None
        assert digest(out / "checkpoints" / name) == digest(whole / "checkpoints" / name)


def test_weights_that_are_not_finite_are_never_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = loop.train_step

    def bad(run: Run) -> int:
        requested = step(run)
        if run.state.step == 4:
            run.head.block_bias.data[0, 0, 0] = float("inf")
        return requested

    monkeypatch.setattr(loop, "train_step", bad)
    with pytest.raises(UserError, match="optim.lr: "):
        run(data, tmp_path / "run")
    assert [p.name for p in disk.checkpoints(tmp_path / "run")] == ["step-2"]


def test_everything_is_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.rename

    def syncing(handle: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def renaming(a: Any, b: Any) -> None:
        events.append(("rename", Path(b)))
        rename(a, b)

    monkeypatch.setattr(heads_checkpoint.os, "fsync", syncing)
    monkeypatch.setattr(heads_checkpoint.os, "rename", renaming)
    final = disk.write(tmp_path, snapshot(3))
    stage = final.with_name(".tmp-step-3")
    at = events.index(("rename", final))
    assert {p for what, p in events[:at]} == {stage, *(stage / p.name for p in final.iterdir())}
    assert events[at - 1] == ("sync", stage) and events[at + 1 :] == [("sync", final.parent)]
    assert disk.damage(final) is None


def test_retiring_keeps_the_newest_up_to_this_step(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        disk.write(tmp_path, snapshot(step))
    disk.retire(tmp_path, 2, 4)  # the run has passed over 5
    assert [disk.step_of(p) for p in disk.checkpoints(tmp_path)] == [4, 3]


def test_a_state_of_another_version_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / disk.STATE).write_text(json.dumps({"step": 3, "stage": 2}))
    with pytest.raises(UserError, match="stage"):
        disk.read(tmp_path)


def test_a_signal_ends_an_evaluation_and_the_resumed_run_makes_it_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, generate, calls = run(data, tmp_path / "whole", *SHORT), evaluation.generate, []

    def interrupted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(*args, **more)

    monkeypatch.setattr(evaluation, "generate", interrupted)
    out = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped at step 3, saved"):
        run(data, out, *SHORT)
    assert not (out / "best").exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run(data, out, *SHORT)
    for folder in (out, whole):
        lines = records(folder / "metrics.jsonl")
        assert [e["step"] for e in lines if e.get("event") == "eval"] == [3, 6]
    assert all(digest(out / name) == digest(whole / name) for name in ("best", "head"))


def test_a_signal_before_the_first_step_ends_the_run_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal came before")

    monkeypatch.setattr(setup, "load_rows", read)
    with pytest.raises(Interrupted, match="stopped at step 0, nothing to save yet") as caught:
        run(data, tmp_path / "run")
    assert caught.value.code == 75


def test_a_disk_without_room_for_the_run_is_refused_before_the_first_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="out_dir: .*are needed"):
        run(data, tmp_path / "run")
    assert not [*(tmp_path / "run").rglob("step-*")]


def test_a_lack_of_memory_is_told_from_a_bug() -> None:
    alloc = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
    assert all(map(is_no_memory, (torch.OutOfMemoryError("x"), MemoryError(), alloc)))
    assert not is_no_memory(RuntimeError("shape mismatch"))
    assert not is_no_memory(OSError("Cannot allocate memory"))
