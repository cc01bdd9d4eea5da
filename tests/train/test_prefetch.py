"""Batches one pass ahead: the same, in turn, and what goes wrong in the thread is heard.

pytest tests/train/test_prefetch.py
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf.errors import UserError
from outrider.train.data.prefetch import Feed
from outrider.train.run import room_of
from tests.helpers.training import run, run_config, sigterm_at_update

PLAN = [[[1, 2], [3]], [[4]], [[5], [6], [7, 8]]]


def feed_of(made: list[Any], steps: int = 3) -> Feed:
    def make(step: int, rows: Sequence[int]) -> Any:
        made.append((step, list(rows), threading.current_thread() is threading.main_thread()))
        if rows == [6]:
            raise UserError("row 6 is unreadable")
        return f"batch {rows}", None

    return Feed(make, PLAN.__getitem__, steps)


def test_the_next_pass_is_made_while_one_is_worked_on() -> None:
    made: list[Any] = []
    feed = feed_of(made, 2)
    found = [[(m.batch, m.rows, m.last) for m in feed.take(step)] for step in range(2)]
    feed.close()
    assert found == [
        [("batch [1, 2]", [1, 2], False), ("batch [3]", [3], True)],
        [("batch [4]", [4], True)],
    ]
    assert made == [(0, [1, 2], True), (0, [3], False), (1, [4], False)]  # none beyond the end


def test_what_goes_wrong_in_the_thread_reaches_the_loop() -> None:
    feed = feed_of([])
    with pytest.raises(UserError, match="row 6"):
        list(feed.take(2))
    feed.close()
    assert not any(t.name.startswith("feed") for t in threading.enumerate())


def test_a_run_ends_its_thread_and_a_resumed_one_is_the_same(data: Path, tmp_path: Path) -> None:
    keys = ("batch_size=8", "micro_tokens=60", "dtype=float64", "save_every=0")
    whole = run(data, tmp_path / "whole", *keys)
    with pytest.MonkeyPatch.context() as patch:
        sigterm_at_update(patch, 3)
        with pytest.raises(Exception, match="stopped at step"):
            run(data, tmp_path / "two", *keys)
    assert not any(t.name.startswith("feed") for t in threading.enumerate())
    again = run(data, tmp_path / "two", *keys)
    states = [load_file(out / "head" / "head.safetensors") for out in (whole, again)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_no_more_than_a_pass_of_training_is_run_at_once(data: Path, tmp_path: Path) -> None:
    """Calibration and parity gate go by tokens too."""
    cfg = run_config(data, tmp_path / "run", "micro_tokens=300", "batch_size=8")
    assert room_of(cfg, 1).tokens == 300 and room_of(cfg, 1).rows == 8
