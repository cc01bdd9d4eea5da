"""A disk that is full for a while: no lost run, and the newest checkpoint stays as it was."""

from __future__ import annotations

import json
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

from outrider.train import checkpoint as disk
from outrider.train import loop
from tests.helpers.faults import finish, fork, outcome, train, wait

# The disk is full from step FULL on, and has space again from step SPACE on.
STEPS, FULL, SPACE = 16, 6, 13
SMALL = (f"steps={STEPS}", "log_every=1", "save_every=4")


def limited(data: Path, out: Path, limit: int) -> None:
    """In the child: no file may grow beyond `limit` bytes while the disk is full; whenever a save
    ends, what the next start would take is noted."""
    step, save = loop.train_step, disk.save
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def stepping(run: Any) -> int:
        change = {FULL: limit, SPACE: hard}.get(run.state.step)
        if change:
            for thread in threading.enumerate():  # the save before belongs to the time before
                if thread.name == "save":
                    thread.join()
            resource.setrlimit(resource.RLIMIT_FSIZE, (change, hard))
        return step(run)

    def saving(folder: Path, snapshot: Any) -> Path:
        try:
            return save(folder, snapshot)
        finally:
            newest, problems = disk.newest(folder)
            notes.append([snapshot.step, disk.step_of(newest) if newest else 0, problems])

    notes: list[Any] = []
    loop.train_step, disk.save = stepping, saving  # type: ignore[assignment]
    try:
        train(data, out, *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        (out / "notes.json").write_text(json.dumps(notes))


def test_a_full_disk_leaves_the_newest_checkpoint_and_the_run_goes_on(
    data: Path, tmp_path: Path
) -> None:
    """No line of metrics is missing either, and the run ends as one that nothing disturbed."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert finish(1, partial(train, data, whole, *SMALL), tmp_path / "said") == [0]
    assert wait(fork(partial(limited, data, out, 2000), tmp_path / "told")) == 0
    notes = json.loads((out / "notes.json").read_text())
    assert notes == [[4, 4, []], [8, 4, []], [12, 4, []], [16, 16, []]]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert outcome(out, STEPS) == outcome(whole, STEPS) and not list(out.rglob(".tmp-*"))
