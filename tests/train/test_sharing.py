"""Which rows of a batch go through together and on which rank: every row once, within the limits,
as many passes everywhere where passes are collectives, and little padding."""

from __future__ import annotations

import random

import pytest

from outrider.train.data.passes import Limits, shared

MEAN, SIGMA, MOST = 770, 0.9, 4096  # tokens of a conversation: log-normal, cut


def drawn(count: int, sigma: float = SIGMA, seed: int = 0) -> list[int]:
    """Lengths of conversations, tokens."""
    chance = random.Random(seed)
    median = 530 if sigma == SIGMA else MEAN
    return [max(16, min(MOST, int(chance.lognormvariate(0, sigma) * median))) for _ in range(count)]


@pytest.mark.parametrize("together", [False, True])
def test_every_row_once_within_the_limits(together: bool) -> None:
    chance = random.Random(together)
    for trial in range(60):
        world = chance.choice([1, 2, 3, 8])
        lengths = sorted(drawn(world * chance.randint(1, 12), chance.choice([0.1, 0.9]), trial))
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
