"""Batches one pass ahead: the same, in turn, and what goes wrong in the thread is heard.

pytest tests/train/test_prefetch.py
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.train.data.prefetch import Made, ahead

PLAN = [[[1, 2], [3]], [[4]], [[5], [6], [7, 8]]]


def feed_of(made: list[Any], step: int = 0) -> Generator[Made, None, None]:
    def make(step: int, rows: Sequence[int]) -> Any:
        made.append((step, list(rows), threading.current_thread() is threading.main_thread()))
        if rows == [6]:
            raise UserError("row 6 is unreadable")
        return f"batch {rows}", None

    return ahead(make, PLAN.__getitem__, range(step, len(PLAN)))


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
