"""Which rows of a batch go through together and on which rank: every row once, within the limits,
as many passes everywhere where passes are collectives, and little padding."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.train.data.passes import Limits, ahead, shared


@pytest.mark.parametrize("together", [False, True])
def test_every_row_once_within_the_limits(together: bool) -> None:
    chance = random.Random(together)
    for _ in range(60):
        world = chance.choice([1, 2, 3, 8])
        lengths = sorted(chance.choices(range(16, 4096), k=world * chance.randint(1, 12)))
        limits = Limits(chance.choice([0, 1, 3]), chance.choice([0, 1, 500, 3000, 10**6]), together)
        ranks = shared(lengths, world, limits)
        assert ranks == shared(lengths, world, limits)
        assert sorted(i for passes in ranks for part in passes for i in part) == [
            *range(len(lengths))
        ]
        assert len(ranks) == world and all(part for passes in ranks for part in passes)
        if together or not limits.tokens:
            assert len({len(passes) for passes in ranks}) == 1
        for part in (part for passes in ranks for part in passes):
            positions = len(part) * max(lengths[i] for i in part)
            assert not limits.rows or len(part) <= limits.rows
            assert not limits.tokens or len(part) == 1 or positions <= limits.tokens


def test_what_goes_wrong_in_the_thread_reaches_the_loop() -> None:
    def make(step: int, rows: Sequence[int]) -> Any:
        raise UserError(f"row {rows[0]} is unreadable")

    with pytest.raises(UserError, match="row 6"):
        list(ahead(make, [[[6]]].__getitem__, range(1)))
    assert not any(t.name.startswith("feed") for t in threading.enumerate())
