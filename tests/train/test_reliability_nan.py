"""What is not finite stops every rank before the update, wherever it comes from and whichever
rank it hits.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.target import Target
from outrider.train import loop, sums
from outrider.train import state as disk
from outrider.train.stored import features
from tests.helpers.faults import Shaky, at_call, digest, finish, train
from tests.helpers.training import chats, run, run_config
from tests.train.test_features import SHAPE, written

STEPS, LOG, QUIET = 8, 5, 6  # an update that ends in a line of metrics, and one that does not
SMALL = (
    f"steps={STEPS}",
    "log_every=3",
    "save_every=1",
    "keep=9",
    "micro_batch=1",
    "bad_steps=1",  # in fewer steps in a row the rows are left out: tests/train/test_bad_rows.py
    *(f"target.{k}={v}" for k, v in SHAPE.items()),
)
KINDS = ("data", "features", "weights", "gradients")


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, chats(folder / "data.jsonl")
        written(self.data, folder / "features")
        self._whole: dict[tuple[int, bool], Path] = {}

    def more(self, kind: str) -> list[str]:
        keys = [f"data.features={self.folder / 'features'}"] if kind == "data" else []
        run_config(
            self.data, self.folder, *SMALL, *keys
        )  # composed in the parent, for all its children
        return keys

    def whole(self, world: int, kind: str) -> Path:
        key = (world, kind == "data")
        if key not in self._whole:
            out = self.folder / f"whole{world}{key[1]}"
            assert finish(
                world,
                partial(train, self.data, out, *SMALL, *self.more(kind)),
                out.with_suffix(".txt"),
            ) == ([0] * world)
            self._whole[key] = out
        return self._whole[key]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("nan")
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield Place(folder)


def poison(kind: str, action: Callable[[], None], call: int, rank: str) -> Callable[[], None]:
    """The same action, with numbers that are not finite in micro-batch `call` of one rank: in
    the stored features of a row, in what the target computes, in a weight before the forward
    pass, or in the gradient after it."""

    def sick() -> None:
        here = os.environ.get("RANK", "0") == rank
        state = {"on": False}
        forward, read, compute = Shaky.forward, features.FeatureStore.read, Target.features
        reads = itertools.count(1)  # a row a micro-batch, in a thread that is ahead of the passes

        def reading(self: Any, row: int, names: Any) -> Any:
            found = read(self, row, names)
            if here and kind == "data" and next(reads) == call:
                found[0][len(found[0]) // 2 :, 0] = float("nan")
            return found

        def computing(self: Any, *args: Any, **more: Any) -> Any:
            found = compute(self, *args, **more)
            if state["on"] and kind == "features":
                found[0, :, 0, 0] = float("inf")
            return found

        def passing(self: Any, batch: Any, target: Any) -> Any:
            if state["on"] and kind == "weights":
                self.block_bias.data[0, 0, 0] = float("nan")
            out = forward(self, batch, target)
            if state["on"] and kind == "gradients":
                out.sum.register_hook(lambda g: g * float("nan"))
            state["on"] = False
            return out

        features.FeatureStore.read, Target.features = reading, computing  # type: ignore[method-assign]
        Shaky.forward = passing  # type: ignore[method-assign]
        at_call(call, lambda: state.update(on=here), action)()

    return sick


def stopped(place: Place, kind: str, world: int, rank: int, step: int) -> bool:
    """Whether all ranks end with code 2 before update `step`, say which rows, and leave the
    checkpoint before it as the undisturbed run has it."""
    out = place.folder / f"{kind}-{world}-{rank}-{step}"
    made, more = out.with_suffix(""), place.more(kind)

    def counted() -> None:
        update = torch.optim.AdamW.step
        calls = out.with_name(f"{out.name}.calls{os.environ.get('RANK', '0')}")

        def counting(self: Any, closure: Any = None) -> Any:
            with calls.open("a") as file:
                file.write(".")
            return update(self, closure)

        torch.optim.AdamW.step = counting  # type: ignore[method-assign]
        train(place.data, out, *SMALL, *more)

    codes = finish(
        world, poison(kind, counted, step * 4 // world + 2, str(rank)), made.with_suffix(".txt")
    )
    updates = [len(out.with_name(f"{out.name}.calls{r}").read_text()) for r in range(world)]
    newest, problems = disk.newest(out)
    report = out / f"bad_step-{step}" / "report.json"
    if (
        codes != [2] * world
        or updates != [step] * world
        or newest is None
        or problems
        or not report.is_file()
    ):
        return False
    rows = json.loads(report.read_text())["rows"]
    same = digest(newest) == digest(place.whole(world, kind) / "checkpoints" / newest.name)
    return (
        disk.step_of(newest) == step
        and same
        and bool(rows)
        and all("data.jsonl:" in row for row in rows)
    )


def test_a_bad_gradient_on_one_rank_stops_both(place: Place) -> None:
    assert stopped(place, "gradients", 2, 1, QUIET)
    assert stopped(place, "data", 1, 0, LOG)


@pytest.mark.slow
def test_whatever_is_not_finite_stops_before_the_update(place: Place) -> None:
    cases = [
        (kind, world, rank, step)
        for kind in KINDS
        for world, rank in ((1, 0), (2, 0), (2, 1))
        for step in (LOG, QUIET)
    ]
    found = {case: stopped(place, *case) for case in cases}
    good = sum(found.values())
    assert good == len(cases), [case for case, fine in found.items() if not fine]


def test_ranks_that_drift_apart_write_no_checkpoint(place: Place) -> None:
    out = place.folder / "drift"

    def drifting() -> None:
        step = loop.train_step

        def bent(run: Any) -> int:
            requested = step(run)
            if os.environ["RANK"] == "1" and run.state.step == 5:
                with torch.no_grad():
                    run.head.block_bias.view(-1)[3] += 1e-6
            return requested

        loop.train_step = bent
        train(place.data, out, *SMALL, "save_every=2")

    assert finish(2, drifting, out.with_suffix(".txt")) == [2, 2]
    said = out.with_name("drift.txt.0").read_text()
    assert "rank 1 has other weights than rank 0 at step 6, no checkpoint was written" in " ".join(
        said.split()
    )
    assert [p.name for p in disk.checkpoints(out)] == ["step-4", "step-2"]


def test_ranks_clip_by_one_norm(place: Place) -> None:
    """Two kinds of GPU may sum the same gradients to norms a bit apart: each rank clipping by
    its own, their weights would drift apart."""
    out = place.folder / "clip"

    def apart() -> None:
        norm = torch.nn.utils.get_total_norm

        def other(*args: Any, **more: Any) -> torch.Tensor:
            return norm(*args, **more) * (1.0 + int(os.environ["RANK"]) / 8)

        torch.nn.utils.get_total_norm = other
        train(place.data, out, *SMALL, "optim.clip=0.01")

    assert finish(2, apart, out.with_suffix(".txt")) == [0, 0]


def test_a_step_waits_for_the_device_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many micro-batches it has: every read of a number on a GPU waits for all that
    was asked of it.
    """
    reads = []
    for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
        real = getattr(torch.Tensor, name)

        def read(self: Any, name: str = name, real: Any = real) -> Any:
            caller = sys._getframe(1).f_code
            if caller.co_filename in (loop.__file__, sums.__file__):
                reads.append(name)
            return real(self)

        monkeypatch.setattr(torch.Tensor, name, read)
    run(data, tmp_path / "run", "steps=3", "micro_batch=1")
    assert reads == ["tolist"] * 3, "nothing else of the loop or of its passes"
