"""Batches one pass ahead: the same, in turn, and what goes wrong in the thread is heard.

pytest tests/train/test_prefetch.py
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.conf.errors import UserError
from outrider.train.data.prefetch import Made, ahead
from tests.helpers.training import run, sigterm_at_update

PLAN = [[[1, 2], [3]], [[4]], [[5], [6], [7, 8]]]


def feed_of(made: list[Any], step: int = 0) -> Generator[Made, None, None]:
    def make(step: int, rows: Sequence[int]) -> Any:
        made.append((step, list(rows), threading.current_thread() is threading.main_thread()))
        if rows == [6]:
            raise UserError("row 6 is unreadable")
        return f"batch {rows}", None

    return ahead(make, PLAN.__getitem__, step)


def test_the_next_pass_is_made_while_one_is_worked_on() -> None:
    made: list[Any] = []
    feed = feed_of(made)
    found = [(m.batch, m.rows, m.last) for m in itertools.islice(feed, 2)]
    feed.close()
    assert found == [("batch [1, 2]", [1, 2], False), ("batch [3]", [3], True)]
    assert made == [(0, [1, 2], False), (0, [3], False), (1, [4], False)]


def test_what_goes_wrong_in_the_thread_reaches_the_loop() -> None:
    with pytest.raises(UserError, match="row 6"):
        list(feed_of([], 2))
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
