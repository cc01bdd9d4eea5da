"""Which rows of a batch go through together and on which rank: every row once, within the limits,
as many passes everywhere where passes are collectives, and little padding."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.packing import Limits, laid, shared

MEAN, SIGMA, MOST = 770, 0.9, 4096  # tokens of a conversation: log-normal, cut


def drawn(count: int, sigma: float = SIGMA, seed: int = 0) -> list[int]:
    """Lengths of conversations, tokens."""
    chance = random.Random(seed)
    median = 530 if sigma == SIGMA else MEAN
    return [max(16, min(MOST, int(chance.lognormvariate(0, sigma) * median))) for _ in range(count)]


def rows_of(lengths: list[int]) -> JoinedRows:
    """Rows of such lengths, without a token."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    places, no = torch.arange(len(lengths)), torch.zeros(len(lengths), dtype=torch.bool)
    return JoinedRows("made up", torch.zeros(1, dtype=torch.int32), no[:1], offsets, places, no, [])


@pytest.fixture(scope="module")
def talks() -> JoinedRows:
    return rows_of(drawn(20_000))


def test_packed_rows_leave_little_padding(talks: JoinedRows) -> None:
    plan = BatchPlan(talks, 64, 1, 0)
    assert plan.waste(Limits(tokens=16384, pack=MOST), 8, 20) < 0.03


@pytest.mark.parametrize(("together", "pack"), [(False, 0), (True, 900)])
def test_every_row_once_within_the_limits(together: bool, pack: int) -> None:
    chance = random.Random(together)
    for trial in range(60):
        world = chance.choice([1, 2, 3, 8])
        lengths = sorted(drawn(world * chance.randint(1, 12), chance.choice([0.1, 0.9]), trial))
        limits = Limits(
            chance.choice([0, 1, 3]), chance.choice([0, 1, 500, 3000, 10**6]), pack, together
        )
        ranks = shared(lengths, world, limits)
        assert ranks == shared(lengths, world, limits)
        assert sorted(i for passes in ranks for part in passes for i in part) == [
            *range(len(lengths))
        ]
        assert len(ranks) == world and all(part for passes in ranks for part in passes)
        if together or not limits.tokens:
            assert len({len(passes) for passes in ranks}) == 1
        for part in (part for passes in ranks for part in passes):
            places, width = laid([lengths[i] for i in part], pack)
            assert not limits.rows or len(part) <= limits.rows
            assert not limits.tokens or len(part) == 1 or len(places) * width <= limits.tokens


def test_sequences_hold_every_row_once_and_no_more_than_fits() -> None:
    chance = random.Random(0)
    for trial in range(60):
        lengths = drawn(chance.randint(1, 40), seed=trial)
        pack = chance.choice([1, 700, 4096, 10**6])
        places, width = laid(lengths, pack)
        assert sorted(i for row in places for i in row) == [*range(len(lengths))]
        assert max(sum(lengths[i] for i in row) for row in places) == width
        assert width <= max(pack, *lengths)
