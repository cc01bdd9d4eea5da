"""Batches one pass ahead: what goes wrong in the thread is heard."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.train.data.prefetch import ahead


def test_what_goes_wrong_in_the_thread_reaches_the_loop() -> None:
    def make(step: int, rows: Sequence[int]) -> Any:
        raise UserError(f"row {rows[0]} is unreadable")

    with pytest.raises(UserError, match="row 6"):
        list(ahead(make, [[[6]]].__getitem__, range(1)))
    assert not any(t.name.startswith("feed") for t in threading.enumerate())
