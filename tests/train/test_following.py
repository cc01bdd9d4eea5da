"""Training beside the command that writes its features: whatever is killed and whenever files come,
the head is the one of a run that found all of them there.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.train.data.batches import BatchPlan
from tests.helpers.faults import digest, finish, fork, outcome, train, wait
from tests.train.test_features import SHAPE, own_memory, written

KEYS = [f"target.{k}={v}" for k, v in SHAPE.items()]
KEYS += ["data.follow=true", "data.follow_batches=2", "steps=11", "save_every=3"]
__all__ = ["own_memory"]  # a fixture


def following(data: Path, features: Path, out: Path, *more: str) -> None:
    train(data, out, *KEYS, f"data.features={features}", *more)


def held(folder: Path) -> list[Path]:
    """The files that were not emptied."""
    return [path for path in folder.glob("shard-*") if path.stat().st_size]


def test_a_round_has_the_rows_of_its_files_and_every_row_is_learned_once(
    data: Path, tmp_path: Path
) -> None:
    rows = written(data, tmp_path / "f").rows
    plain, plan = BatchPlan(rows, 4, 2, 7), BatchPlan(rows, 4, 2, 7, follow=3)
    steps, seen = range(plan.per_epoch), []
    for step in steps:
        end, inside = plan.round(step)
        assert step < end and {*plan.batch(step)} <= {*inside.tolist()}
        seen += plan.batch(step)
    assert len({*seen}) == len(seen) == 4 * plan.per_epoch
    assert int(plan.round(2)[1][-1]) < int(plan.round(3)[1][0])
    assert [plan.batch(k) for k in steps] != [plain.batch(k) for k in steps]
    later = range(plan.per_epoch, 2 * plan.per_epoch)
    assert [plan.batch(k) for k in later] == [plain.batch(k) for k in later]
    assert torch.equal(plan.round(plan.per_epoch)[1], plan.train)
    one = BatchPlan(rows, 4, 2, 7, follow=plan.per_epoch + 1)
    assert [one.batch(k) for k in steps] == [plain.batch(k) for k in steps]


@pytest.mark.parametrize("delete", [False, True])
def test_killed_at_random_the_head_is_that_of_an_undisturbed_run(
    delete: bool, data: Path, tmp_path: Path
) -> None:
    """Ten kills each of a writer, with room for a few files, and of the training beside it."""
    writer, place = written(data, tmp_path / "whole", per_shard=3), tmp_path / "f"
    following(data, tmp_path / "whole", tmp_path / "undisturbed")
    writer.folder, said = place, tmp_path / "t"

    def write() -> None:
        writer.begin()
        for number in writer.missing:
            while delete and len(held(place)) > 5:
                time.sleep(0.01)
            time.sleep(0.4)
            list(writer.shard(number, writer.computed([number])))

    def learn() -> None:
        following(data, place, tmp_path / "run", f"data.follow_delete={str(delete).lower()}")

    draw, children, kills = random.Random(3), dict[Any, int](), Counter[Any]()
    left, end = {write, learn}, time.monotonic() + 200
    while left:
        children |= {action: fork(action, said) for action in left - children.keys()}
        time.sleep(draw.uniform(0.05, 0.9))
        for action in [*left]:
            child = children[action]
            if kills[action] < 10 or time.monotonic() > end:
                kills[action] += 1
                os.killpg(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if kills[action] < 10 else os.WNOHANG)
            if ended:
                del children[action]
                assert time.monotonic() < end, said.read_text()
                left -= set() if status else {action}
    assert [*kills.values()] == [10, 10]
    assert "waiting for " in said.read_text()
    assert digest(tmp_path / "run/head") == digest(tmp_path / "undisturbed/head")
    writer.begin()
    assert len(held(place)) == (0 if delete else 16) and not [*place.glob(".tmp-*")]


def test_a_signal_ends_the_waiting_and_what_is_gone_is_not_waited_for(
    data: Path, tmp_path: Path
) -> None:
    writer, place, said = written(data, tmp_path / "f"), tmp_path / "f", tmp_path / "said"
    files = sorted(place.glob("shard-*"))
    content = [file.read_bytes() for file in files]
    for file in files[2:]:
        file.unlink()
    more = ("data.follow_delete=true",)
    child = fork(lambda: following(data, place, tmp_path / "run", *more), said)
    while not said.exists() or "waiting for " not in said.read_text():
        time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    assert wait(child) == 75 and held(place) == files[1:2] and writer.missing == [2, 3]
    for file, whole in zip(files[2:], content[2:], strict=True):
        file.write_bytes(whole)
    for other in ("follow=true", "follow=false"):
        keys = (f"data.features={place}", "data.follow_batches=2", f"data.{other}")
        with pytest.raises(UserError, match="shard-00000"):
            train(data, tmp_path / other, *KEYS[:-4], *keys)
    with pytest.raises(UserError, match=r"data\.skip: \[\] in the checkpoint, \[3\] now"):
        following(data, place, tmp_path / "run", *more, "data.skip=[3]")
    following(data, place, tmp_path / "run", *more)
    assert not held(place) and writer.missing == []


def test_a_writer_has_room_for_so_many_files(data: Path, tmp_path: Path) -> None:
    writer = written(data, tmp_path / "f", "room_gb=1", "shard_mb=200")  # 4 files
    assert not writer.full(ranks=1) and writer.full(ranks=2)


@pytest.mark.slow
def test_ranks_wait_together(data: Path, tmp_path: Path) -> None:
    writer, place = written(data, tmp_path / "f", per_shard=3), tmp_path / "f"
    for name in ("undisturbed", "run"):
        late = [*place.glob("shard-*")] if name == "run" else []
        for file in late:
            file.unlink()

        def write() -> None:
            for number in writer.missing:
                time.sleep(0.2)
                list(writer.shard(number, writer.computed([number])))

        child = fork(write)
        more = f"data.follow_delete={str(bool(late)).lower()}"
        learn = functools.partial(following, data, place, tmp_path / name, more)
        assert finish(2, learn) == [0, 0] and wait(child) == 0
    assert outcome(tmp_path / "run", 11) == outcome(tmp_path / "undisturbed", 11)
