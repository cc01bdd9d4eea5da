"""The training loop: resuming, accumulation, faults, two processes, the command line."""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import records
from outrider.heads.checkpoint import read_card
from outrider.heads.registry import head_class
from outrider.train import checkpoint as disk
from outrider.train.checkpoint import locked
from outrider.train.config import planned_steps
from outrider.train.loop import fit
from outrider.train.resuming import check_meaning
from tests.helpers.faults import finish
from tests.helpers.training import chats, run, run_config, sigterm_at_update


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "head.safetensors").read_bytes()).hexdigest()


def test_a_run_leaves_what_it_promises_and_learns(data: Path, tmp_path: Path) -> None:
    keys = "steps=30 optim.lr=0.01 eval.every=15 eval.prompts=3 eval.max_new_tokens=8 save_every=10"
    out = run(data, tmp_path / "run", *keys.split())
    assert {"head", "best", "checkpoints", "metrics.jsonl"} <= {p.name for p in out.iterdir()}
    assert [p.name for p in disk.checkpoints(out)] == ["step-30", "step-20"]
    lines = records(out / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0] and len(losses) == 15
    evals = [line for line in lines if line.get("event") == "eval"]
    assert [e["step"] for e in evals] == [15, 30] and all(e["accepted_length"] >= 1 for e in evals)
    best = max(evals, key=lambda e: e["accepted_length"])
    assert read_card(out / "best")["extra"]["step"] == best["step"]
    assert read_card(out / "head")["head"]["calibration"]["positions"] > 0


def test_a_finished_run_is_left_alone(data: Path, tmp_path: Path) -> None:
    out = run(data, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    run(data, tmp_path / "run")
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")} == before


def test_changed_meaning_is_refused_and_changed_logistics_are_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = run(data, tmp_path / "run", "steps=2")
    moved = data.rename(tmp_path / "moved.jsonl")
    run(moved, out, "steps=2", "log_every=1", "micro_batch=2")
    said = capsys.readouterr().err
    assert "log_every: 2 -> 1" in said and "micro_batch: 0 -> 2" in said
    for change, named in (
        ("steps=1", "steps: 2 in the checkpoint, 1 now"),
        ("seed=1", "seed: 0"),
        ("head.heads=3", "head.heads"),
        ("target.seed=5", "target.weights_sha256"),
        ("data.max_length=40", "data.sha256"),
    ):
        with pytest.raises(UserError, match="out_dir: .*learns something else") as caught:
            run(moved, out, *([] if change.startswith("steps") else ["steps=2"]), change)
        assert named in str(caught.value)
    moved.write_text(moved.read_text().replace("rider", "walker"))
    with pytest.raises(UserError, match=r"data.sha256: \w{12} in the checkpoint, \w{12} now"):
        run(moved, out, "steps=2")


def test_a_key_that_came_later_may_stand_at_its_default(tmp_path: Path) -> None:
    saved, default = {"seed": 0, "gone": 1}, {"seed": 0, "new": False}
    assert check_meaning({"seed": 0}, {"seed": 0, "new": False}, tmp_path, default) == []
    for now in ({"seed": 0, "new": True}, {"seed": 0, "features": "stored"}):
        with pytest.raises(UserError, match="not set in the checkpoint"):
            check_meaning({"seed": 0}, now, tmp_path, default)
    with pytest.raises(UserError, match="gone: 1 in the checkpoint, not set now"):
        check_meaning(saved, {"seed": 0}, tmp_path, default)


def test_newest_sound_checkpoint_wins_over_a_torn_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = run(data, tmp_path / "whole")
    for name, how in ((disk.WEIGHTS, "gone"), (disk.STATE, "gone"), (disk.OPTIMIZER, "cut")):
        out = tmp_path / name
        shutil.copytree(whole, out)
        shutil.rmtree(out / "head")
        file = out / "checkpoints/step-6" / name
        content = file.read_bytes()
        file.unlink()
        if how == "cut":
            file.write_bytes(content[: len(content) // 2])
        found, problems = disk.newest(out)
        assert found is not None and found.name == "step-4" and len(problems) == 1
        assert "step-6/" in problems[0]
    assert weights(run(data, out) / "head") == weights(whole / "head")
    assert "passed over: " in capsys.readouterr().err


def test_a_full_disk_ends_the_run_in_a_line_and_the_same_command_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, save, calls = run(data, tmp_path / "whole"), disk.save_file, []

    def full(*args: Any, **keys: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # of the second checkpoint
            raise OSError(28, "No space left on device")
        save(*args, **keys)

    monkeypatch.setattr(disk, "save_file", full)
    with pytest.raises(UserError, match="out_dir: cannot save .*No space left"):
        run(data, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]
    assert weights(run(data, tmp_path / "run") / "head") == weights(whole / "head")


def test_minutes_end_a_run_and_its_schedule(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second a step: as many as fit in, the rate at its end; with more minutes it goes on."""
    ticks = SimpleNamespace(perf_counter=count().__next__, process_time=count().__next__)
    monkeypatch.setattr("outrider.train.loop.time", ticks)
    keys = ("steps=0", "epochs=1e6", "optim.lr=0.01", "log_every=1", "save_every=0")
    for minutes, most in ((0.2, 12), (0.3, 18)):
        out = run(data, tmp_path / "run", *keys, f"minutes={minutes}")
        lines = records(out / "metrics.jsonl")
        rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
        assert list(rates) == list(range(1, most + 1))
        assert rates[most] == pytest.approx(0.0005) and max(rates.values()) > 0.009
    assert planned_steps(10, 60.0, 99, 2.0) == 20 and planned_steps(10, 60.0, 15, 2.0) == 15


def test_one_run_per_folder(data: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        assert finish(1, partial(run, data, tmp_path / "run"), tmp_path / "said") == [2]
    assert "another run is writing to" in (tmp_path / "said").read_text()
    with pytest.raises(UserError, match="out_dir: cannot write"):
        run(data, Path("/proc/nowhere"))


# What a run has seen and spent, and its best weights
# -------------------------------------------------------------------------------------------


MORE = ("eval.every=3", "eval.prompts=2", "eval.max_new_tokens=6", "log_every=1")


def test_counts_survive_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chats(tmp_path / "d.jsonl")
    clocks = {
        "perf_counter": count().__next__,
        "process_time": count(0, 2).__next__,
    }  # a second a look, two of the CPU
    monkeypatch.setattr("outrider.train.loop.time", SimpleNamespace(**clocks))
    fit(run_config(data, tmp_path / "whole", *MORE), head_class("medusa"))
    sigterm_at_update(monkeypatch, 4)
    with pytest.raises(Interrupted):
        fit(run_config(data, tmp_path / "cut", *MORE), head_class("medusa"))
    fit(run_config(data, tmp_path / "cut", *MORE), head_class("medusa"))
    whole, cut = (
        [e for e in records(tmp_path / name / "metrics.jsonl") if "loss" in e]
        for name in ("whole", "cut")
    )
    assert [e["step"] for e in cut] == [1, 2, 3, 4, 5, 6]
    for key in ("tokens_seen", "supervised_seen", "train_seconds", "cpu_seconds"):
        assert [e[key] for e in cut] == [e[key] for e in whole] and whole[0][key] > 0
    assert [e["cpu_seconds"] for e in cut] == [2, 4, 6, 8, 10, 12]


def test_best_is_kept_over_a_resume_and_follows_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best/ is the checkpoint of the longest accepted length, not the last and not the one of
    the lowest loss.
    """
    from outrider.heads.checkpoint import read_card

    data, message = chats(tmp_path / "d.jsonl"), iter([1.5, 1.2, 1.1])
    wanted = {"shape": "chain", "low": None, "high": None, "cycles": 3}
    monkeypatch.setattr(
        "outrider.train.evaluation.decoded_acceptance",
        lambda *a: {**wanted, "accepted_length": next(message)},
    )
    out, small = tmp_path / "run", ("eval.every=2", "save_every=2")
    sigterm_at_update(monkeypatch, 3)
    with pytest.raises(Interrupted):
        fit(run_config(data, out, *small), head_class("medusa"))
    assert read_card(out / "best")["extra"]["step"] == 2
    fit(run_config(data, out, *small), head_class("medusa"))
    assert (
        read_card(out / "best")["extra"]["step"] == 2
        and read_card(out / "head")["extra"]["step"] == 6
    )
    assert read_card(out / "head")["extra"]["best"] == {"step": 2, "accepted_length": 1.5}
