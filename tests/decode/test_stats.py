"""The figures on cycles small enough to count by hand."""

from __future__ import annotations

import math

import pytest

from outrider.decode.engine import Cycle, Generation
from outrider.decode.stats import (
    acceptance_by_position,
    accepted_length,
    loop_starts,
    paired_difference,
    split,
)


def cycle(accepted: int, proposed: int = 3, cut: bool = False, start: int = 0) -> Cycle:
    return Cycle(proposed, accepted, cut, start)


def test_accepted_length_counts_the_bonus_token() -> None:
    got = accepted_length([[cycle(0), cycle(3)], [cycle(1), cycle(2)]])
    assert got.mean == (1 + 4 + 2 + 3) / 4
    assert got.low is not None and got.high is not None and got.low <= got.mean <= got.high
    alone = accepted_length([[cycle(2)], []])
    assert (alone.mean, alone.low) == (3, None)
    assert math.isnan(accepted_length([[], []]).mean)


def test_positions() -> None:
    table = acceptance_by_position([cycle(0), cycle(1), cycle(3), cycle(1, proposed=1)])
    assert [(p.position, p.trials) for p in table] == [(1, 4), (2, 2), (3, 1)]
    assert [p.conditional for p in table] == [3 / 4, 1 / 2, 1.0]
    assert [p.unconditional for p in table] == [3 / 4, 1 / 4, 1 / 4]


def test_loops_begin_at_the_third_sight_of_eight_tokens() -> None:
    period = list(range(8))
    tokens = [100, *period * 4]
    starts = loop_starts(tokens)
    assert starts.index(True) == 1 + 24  # the eight tokens have been generated three times
    assert all(starts[25:])
    generation = Generation(
        [1], tokens, [cycle(1, start=10), cycle(1, start=25), cycle(1, start=30, cut=True)]
    )
    parts = split(generation)
    assert [len(parts.clean), len(parts.loop), len(parts.cut)] == [1, 1, 1]
    assert not any(loop_starts(list(range(60))))


def test_paired_difference_is_paired() -> None:
    a = [[cycle(k % 3)] * 4 for k in range(30)]
    b = [[cycle(k % 3 + 1)] * 4 for k in range(30)]
    got = paired_difference(b, a)
    assert (
        got.mean == pytest.approx(1)
        and got.low == pytest.approx(1)
        and got.high == pytest.approx(1)
    )
    with pytest.raises(ValueError, match="prompts"):
        paired_difference(a, b[:3])
