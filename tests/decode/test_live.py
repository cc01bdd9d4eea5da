"""The running batch behind streamed answers: rows join and leave, and keep their tokens."""

from __future__ import annotations

import pytest

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.live import LiveBatch, LiveLimits
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", context=512), "float32", "cpu")


def test_rows_that_join_and_leave_keep_their_tokens(target: Target) -> None:
    ids = [[3 + i, 4, 5, 3 + i, 4, 5, 6] for i in range(7)]
    for sampling in (Sampling(), Sampling(0.9, top_p=0.9)):
        wanted = [
            generate(target, NGram(), [Request(p, 24, id=n)], sampling).generations[0].token_ids
            for n, p in enumerate(ids)
        ]
        batch = LiveBatch(target, NGram(), sampling, LiveLimits(3, 64))
        got: dict[int, list[int]] = {n: [] for n in range(len(ids))}
        seats, ended = {}, []
        for step in range(200):
            if step % 3 == 0 and len(seats) < len(ids):
                n = len(seats)
                seats[n] = batch.join(
                    Request(ids[n], 24, id=n), lambda f, to=got[n]: to.extend(f.tokens)
                )
            if step == 7:
                batch.leave(seats[1])
            ended += batch.step()
            if len(seats) == len(ids) and not batch.busy:
                break
        assert sorted(s.number for s in ended) == list(range(len(ids))) and not batch.rows
        assert seats[1].generation.finish == "left"
        assert got[1] == wanted[1][: len(got[1])]
        assert [got[n] for n in got if n != 1] == [wanted[n] for n in got if n != 1]


def test_a_seat_that_is_refused_leaves_nothing(target: Target) -> None:
    batch = LiveBatch(target, NoDraft(), Sampling(), LiveLimits(1, 8))
    for prompt in ([], [3] * 8, [10**6]):
        with pytest.raises(UserError):
            batch.join(Request(prompt, 4), lambda fresh: None)
    assert not batch.busy and batch.step() == []
