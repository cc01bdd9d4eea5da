"""Kills, resumes, signals and restarts of real processes, which end with the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from outrider.train import checkpoint as disk
from outrider.train import loop
from outrider.train.data.batches import BatchPlan
from outrider.train.setup import explained, is_peer_gone
from tests.helpers import faults
from tests.helpers.faults import Marks, at_call, finish, launcher, outcome, ranks, train, wait
from tests.helpers.training import chats, run_config

STEPS = 12  # more than two epochs
SMALL = (f"steps={STEPS}", "micro_batch=1", "log_every=3")
TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Place:
    """Data, and the uninterrupted runs of one and of two ranks that others are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self._count = folder, chats(folder / "data.jsonl", 24), 0
        self.whole = cache(self._whole)

    def fresh(self) -> Path:
        self._count += 1
        return self.folder / f"run{self._count}"

    def action(self, out: Path, *more: str) -> Callable[[], None]:
        run_config(self.data, out, *SMALL, *more)  # composed in the parent, for all its children
        return partial(train, self.data, out, *SMALL, *more)

    def _whole(self, world: int) -> tuple[str, str]:
        out = self.fresh()
        said = out.with_suffix(".txt")
        assert finish(world, self.action(out, "save_every=0"), said) == [0] * world, out
        return outcome(out, STEPS)

    def resumed(self, world: int, out: Path) -> bool:
        """Whether the run in `out` goes on to the weights and moments of the uninterrupted
        one, and leaves it tidy.
        """
        codes = finish(world, self.action(out, "save_every=7"), out.with_suffix(".txt"))
        tidy = not list(out.rglob(".tmp-*")) and not list(out.rglob(".old-*"))
        return codes == [0] * world and tidy and outcome(out, STEPS) == self.whole(world)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("faults"))


def test_killed_runs_resume_to_the_same_bits(place: Place) -> None:
    """After kill -9 at a random moment, where they save after every step; the last has two
    ranks."""
    chance = random.Random(0)
    for number in range(5):
        world, out, marks = 2 if number == 4 else 1, place.fresh(), Marks()
        run = marks.steps(place.action(out, "save_every=1"))
        children = ranks(world, run, out.with_suffix(".txt"))
        steps = world * chance.randrange(1, STEPS)
        while marks.seen() < steps and all(os.waitpid(c, os.WNOHANG) == (0, 0) for c in children):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        for child in children:
            os.kill(child, KILL)
        codes = [wait(child) for child in children]
        marks.close()
        newest, problems = disk.newest(out)
        # the mark stands before the step
        lost = steps // world - 1 - (disk.step_of(newest) if newest else 0)
        # else it was faster than the signal
        assert not problems and (codes != [-KILL] * world or lost <= 2), out
        assert place.resumed(world, out), out


@pytest.mark.parametrize(("world", "step"), [(1, STEPS - 1), (2, 5)])
def test_stopped_runs_resume_to_the_same_bits(place: Place, world: int, step: int) -> None:
    """After the step in which one rank was asked to."""
    out, per_step = place.fresh(), 4 // world  # micro-batches of a rank

    def event() -> None:
        if os.environ.get("RANK", "0") == str(world - 1):
            os.kill(os.getpid(), TERM)

    run = at_call(1 + step * per_step, event, place.action(out, "save_every=4"))
    assert finish(world, run, out.with_suffix(".txt")) == [75] * world
    newest, problems = disk.newest(out)
    assert newest is not None and disk.step_of(newest) == step + 1 and not problems
    assert place.resumed(world, out)


def elastic(place: Place, worlds: list[int], stops: list[int]) -> tuple[Any, dict[int, float]]:
    """Rows of every step, in the order of their numbers, and unrounded losses, of a float64 run
    that is stopped before the given steps and goes on with another number of ranks."""
    out = place.fresh()
    out.mkdir()

    def segment(stop: int) -> None:
        shares, report, step = BatchPlan.shares, loop._report, loop.train_step

        def stepping(run: Any) -> int:
            if run.state.step == stop - 1:
                os.kill(os.getpid(), TERM)
            return step(run)

        def reporting(run: Any, *rest: Any) -> None:
            size = run.cfg.micro_batch, run.cfg.micro_tokens
            parts = shares(run.plan, run.state.step - 1, run.world, faults.Limits(*size))
            rows = sorted(row for share in parts for part in share for row in part)
            total, count = run.state.window["loss"]
            if run.main:
                with (out / "steps.jsonl").open("a") as file:
                    line = [run.state.step, rows, (total / count).hex()]
                    file.write(json.dumps(line) + "\n")
            report(run, *rest)

        loop._report, loop.train_step = reporting, stepping
        more = ("dtype=float64", "save_every=0", "log_every=1")
        loop.fit(run_config(place.data, out, *SMALL, *more), faults.head_class("medusa"))

    for world, stop in zip(worlds, [*stops, STEPS + 1], strict=True):
        codes = finish(world, partial(segment, stop), out / "said")
        assert codes == [75 if stop <= STEPS else 0] * world
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [k for k, _, _ in lines] == list(range(1, STEPS + 1))
    return [rows for _, rows, _ in lines], {k: float.fromhex(loss) for k, _, loss in lines}


def test_two_one_two_processes(place: Place) -> None:
    alone, changing = elastic(place, [1], []), elastic(place, [2, 1, 2], [5, 9])
    assert alone[0] == changing[0]
    assert max(abs(alone[1][k] - changing[1][k]) for k in alone[1]) <= 1e-9


def test_who_outlives_a_killed_rank_says_so_in_one_line(place: Place) -> None:
    """Also where it is rank 0, which alone speaks otherwise, that is gone."""
    out, hit, left = place.fresh(), 0, 1

    def event() -> None:
        if os.environ["RANK"] == str(hit):
            os.kill(os.getpid(), KILL)

    said = out.with_suffix(".txt")
    codes = finish(2, at_call(4, event, place.action(out, "save_every=1")), said)
    assert (codes[hit], codes[left]) == (-KILL, 1)
    words = said.with_name(f"{said.name}.{left}").read_text().splitlines()
    assert "Traceback" not in "".join(words)
    assert words[-1].startswith("one of 2 processes is gone") and str(out) in words[-1]
    assert place.resumed(2, out)


def test_what_libraries_say_of_peers_and_gpus_is_told_from_a_bug() -> None:
    for words, gone in (
        ("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", True),
        ("NCCL error in: X.cpp:1, remote process exited, ncclRemoteError: a call failed", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms", False),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ):
        assert is_peer_gone(RuntimeError(words)) == gone
        assert not is_peer_gone(ConnectionResetError(words))  # a hub, a tracker
    words = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4e000"
    assert "num_processes" in str(explained(RuntimeError(words), 2, "run"))


def test_a_killed_rank_is_restarted_and_resumes(place: Place) -> None:
    """By torchrun's agent, which starts both again."""
    out = place.fresh()
    out.mkdir()

    def once() -> None:
        if os.environ["RANK"] == "0" and not (out / "killed").exists():
            (out / "killed").write_text("")
            os.kill(os.getpid(), KILL)

    run = at_call(9, once, place.action(out, "save_every=3"))
    assert wait(launcher(run, 3, out.with_suffix(".txt"))) == 0
    assert (out / "killed").exists() and outcome(out, STEPS) == place.whole(2)
