"""Checkpoints: written beside the training from a snapshot, in an order that survives a power
cut, retired with care; locks, clocks and folders that go away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.heads import checkpoint as heads_checkpoint
from outrider.train import checkpoint as disk
from outrider.train import loop, saving
from outrider.train.checkpoint import Snapshot
from outrider.train.facts import is_no_memory, no_memory
from outrider.train.run import Run
from tests.helpers.faults import digest
from tests.helpers.training import run, run_config


def snapshot(step: int, value: float = 0.0) -> Snapshot:
    state = {"step": step, "evaluated": -1, "best": {}, "window": {}, "meaning": {}, "seen": {}}
    return Snapshot(
        state, {"w": torch.full((9,), value)}, {"0.exp_avg": torch.zeros(9)}, "medusa", {}, None
    )


# before the training
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [("save_every=1", "keep=2"), ("save_every=0",), ("save_every=4",)])
def test_a_full_disk_is_found_before_the_first_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """One byte less than the run needs: no step. Exactly as many: it holds no more at one time,
    and hardly less. A run that is done needs none."""
    usage, out, free = type(shutil.disk_usage("/")), tmp_path / "run", [0]
    asked, held, needed, retire = list[int](), list[int](), saving.needed, disk.retire

    def recorded(*given: Any) -> int:
        asked.append(needed(*given))
        return asked[-1]

    def retiring(*given: Any) -> None:
        held.append(sum(p.stat().st_size for p in out.rglob("*.safetensors")))
        retire(*given)

    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, free[0]))
    monkeypatch.setattr(saving, "needed", recorded)
    monkeypatch.setattr(disk, "retire", retiring)
    for _ in range(2):
        with pytest.raises(UserError, match="out_dir: .* are needed"):
            run(data, out, *keys)
        free[0] = asked[0] - 1
    assert not (out / "metrics.jsonl").exists() and not (out / "checkpoints").exists()
    free[0] = asked[0]
    run(data, out, *keys)
    head = (out / "head" / "head.safetensors").stat().st_size
    assert 0 <= asked[0] - disk.MARGIN - (max(held) + 2 * head) < 1.1 * head
    free[0] = disk.MARGIN
    run(data, out, *keys)


# beside the training
# ------------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    data, tmp_path, monkeypatch
) -> None:
    """Every write waits until the run has made another update; what it holds is the step of
    its name.
    """
    steps = ("steps=7", "save_every=2", "keep=9")
    whole = run(data, tmp_path / "whole", *steps, "async_save=false")
    made, save, step, threads = threading.Condition(), disk.save, loop.train_step, set()
    reached = 0

    def stepping(run: Run) -> int:
        nonlocal reached
        requested = step(run)
        with made:
            reached = run.state.step
            made.notify_all()
        return requested

    def late(folder: Path, taken: Snapshot) -> Path:
        threads.add(threading.current_thread().name)
        if taken.step < 7:
            with made:
                assert made.wait_for(lambda: reached > taken.step, timeout=60)
        return save(folder, taken)

    monkeypatch.setattr(loop, "train_step", stepping)
    monkeypatch.setattr(disk, "save", late)
    out = run(data, tmp_path / "run", *steps)
    assert threads == {"save", "MainThread"}, "the last one is awaited"
    for name in ("step-2", "step-4", "step-6", "step-7"):
        for place in (out, whole):
            assert disk.damage(place / "checkpoints" / name) is None
        assert digest(out / "checkpoints" / name) == digest(whole / "checkpoints" / name)


def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, monkeypatch) -> None:
    step = loop.train_step

    def bad(run: Run) -> int:
        requested = step(run)
        if run.state.step == 4:
            run.head.block_bias.data[0, 0, 0] = float("inf")
        return requested

    monkeypatch.setattr(loop, "train_step", bad)
    with pytest.raises(
        UserError, match="weights are not finite at step 4, no checkpoint was written"
    ):
        run(data, tmp_path / "run")
    assert [p.name for p in disk.checkpoints(tmp_path / "run")] == ["step-2"]


# on disk
# -----------------------------------------------------------------------------


def test_everything_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch) -> None:
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
    final = disk.save(tmp_path, snapshot(3))
    stage = final.with_name(".tmp-step-3")
    at = events.index(("rename", final))
    assert {p for what, p in events[:at]} == {stage, *(stage / p.name for p in final.iterdir())}
    assert events[at - 1] == ("sync", stage) and events[at + 1 :] == [("sync", final.parent)]
    assert disk.damage(final) is None


def test_retiring_never_removes_the_last_good_one(tmp_path) -> None:
    def spoil(step: int) -> None:
        (tmp_path / f"checkpoints/step-{step}/optimizer.safetensors").write_bytes(b"x")

    def there() -> list[int]:
        return [disk.step_of(p) for p in disk.checkpoints(tmp_path)]

    for step in (1, 2, 3, 4, 5):
        disk.save(tmp_path, snapshot(step))
    for step in (3, 4, 5):
        spoil(step)
    disk.retire(tmp_path, 2, 5)
    assert there() == [5, 4, 2], "2 is the newest sound one"
    disk.save(tmp_path, snapshot(3))
    disk.retire(tmp_path, 2, 3)  # the run has passed over 5 and 4
    assert there() == [3, 2] and disk.newest(tmp_path)[1] == []
    for step in (4, 5, 6):
        disk.save(tmp_path, snapshot(step))
    disk.retire(tmp_path, 2, 6)
    assert there() == [6, 5]


def test_a_manifest_is_known_by_its_own_hash(tmp_path) -> None:
    path = disk.save(tmp_path, snapshot(3)) / disk.MANIFEST
    good = path.read_text()
    for text in (
        good.replace('"step": 3', '"step": 4'),
        good.replace(" ", "  ", 1),
        good + "\n",
        "[" * 9999,
        "3",
        good.replace(f'"{disk.CARD}"', '"other.json"'),
        disk.text_of({k: v for k, v in json.loads(good).items() if k != "sha256"}),
    ):
        path.write_text(text)
        assert str(path) in (disk.damage(path.parent) or "")
    path.write_text(good)
    assert disk.damage(path.parent) is None
    weights = path.with_name(disk.WEIGHTS)
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert "outside its folder" in (disk.damage(path.parent) or "")


def test_a_state_of_another_version_is_refused_in_a_line(tmp_path) -> None:
    (tmp_path / disk.STATE).write_text(json.dumps({"step": 3, "stage": 2}))
    with pytest.raises(UserError, match="this version cannot read it .*stage"):
        disk.read(tmp_path)


# folders, locks and clocks
# ------------------------------------------------------------------------------------------


# signals and words
# --------------------------------------------------------------------------------------------------


def test_a_signal_ends_an_evaluation_and_the_resumed_run_makes_it_again(
    data, tmp_path, monkeypatch
) -> None:
    from outrider.train import accept

    short = ("eval.every=3", "eval.prompts=3", "eval.max_new_tokens=6")
    whole, generate, calls = run(data, tmp_path / "whole", *short), accept.generate, []

    def interrupted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(*args, **more)

    monkeypatch.setattr(accept, "generate", interrupted)
    out = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped at step 3, saved"):
        run(data, out, *short)
    assert not (out / "best").exists()
    run(data, out, *short)
    for folder in (out, whole):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [e["step"] for e in lines if e.get("event") == "eval"] == [3, 6]
    assert digest(out / "best") == digest(whole / "best") and digest(out / "head") == digest(
        whole / "head"
    )


def test_an_evaluation_without_memory_is_message_and_the_run_goes_on(
    data, tmp_path, monkeypatch, capsys
) -> None:
    """Were it an error, a restarted run would meet it again at the same step, for ever."""
    from outrider.train import accept

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(accept, "generate", full)
    short = ("save_every=3", "eval.every=3", "eval.prompts=3", "eval.max_new_tokens=6")
    out = run(data, tmp_path / "run", *short)
    said = capsys.readouterr().err
    assert "step 3: not evaluated: it does not fit into memory; set eval.batch_size" in said
    assert (out / "head").exists() and disk.read(out / "checkpoints/step-6").evaluated == 3


def test_a_tracker_knows_runs_by_folder_target_and_data(data, tmp_path) -> None:
    from outrider.train.log import identity_of

    def name(out: str, **meaning: Any) -> str:
        cfg = run_config(data, tmp_path / out)
        return identity_of(cfg, {"target.weights_sha256": "a", "seed": 0, **meaning})

    same = name("run")
    assert name("run", **{"optim.lr": 3, "steps": 9, "data.path": "moved"}) == same
    others = [name("other"), name("run", **{"target.weights_sha256": "b"}), name("run", seed=1)]
    others.append(name("run", **{"data.sha256": "c"}))
    assert len({same, *others}) == 5


def test_no_memory_names_what_can_still_be_lowered(data, tmp_path) -> None:
    cfg = run_config(data, tmp_path / "run", "batch_size=8")
    assert "micro_batch: 4 rows do not fit into memory; set micro_batch=2" in no_memory(
        cfg, world=2
    )
    cfg = replace(cfg, micro_batch=1)
    assert no_memory(cfg).startswith("data.max_length: one row of up to 1024 tokens does not fit")
    for error in (
        torch.OutOfMemoryError("x"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    ):
        assert is_no_memory(error)
    assert not is_no_memory(RuntimeError("shape mismatch")) and not is_no_memory(
        OSError("Cannot allocate memory")
    )
