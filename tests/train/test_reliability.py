"""Kills, resumes, signals and restarts of real processes. Each campaign runs a small share in
the fast suite; its slow test runs all of it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.train import checkpoint as disk
from outrider.train import loop
from outrider.train.data.batches import BatchPlan
from outrider.train.data.load import load_rows
from outrider.train.setup import explained, is_peer_gone
from tests.helpers import faults
from tests.helpers.faults import Marks, at_call, finish, launcher, outcome, ranks, train, wait
from tests.helpers.training import chats, run_config, tiny_target

SMALL = ("micro_batch=1", "log_every=3")
TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Place:
    """Data, and the uninterrupted runs that others are compared with: `steps` steps, which are
    more than two epochs of `per_epoch`."""

    def __init__(self, folder: Path, steps: int, rows: int) -> None:
        self.folder, self.data, self.steps = folder, chats(folder / "data.jsonl", rows), steps
        cfg, target = run_config(self.data, folder / "none"), tiny_target()
        found = load_rows(
            cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
        )
        self.per_epoch = BatchPlan(found, cfg.batch_size, cfg.data.window, cfg.seed).per_epoch
        assert 2 * self.per_epoch < steps
        self._whole: dict[Any, tuple[str, str]] = {}
        self.pace = 0.05  # seconds from one step to the next, with a save between
        self._count = 0

    def fresh(self, name: str = "run") -> Path:
        self._count += 1
        return self.folder / f"{name}{self._count}"

    def action(self, out: Path, *more: str) -> Callable[[], None]:
        keys = (f"steps={self.steps}", *SMALL, *more)
        run_config(self.data, out, *keys)  # composed in the parent, for all its children
        return partial(train, self.data, out, *keys)

    def whole(self, world: int = 1) -> tuple[str, str]:
        if world not in self._whole:
            out, marks = self.fresh(f"whole{world}-"), Marks()
            run = (
                marks.steps(self.action(out, "save_every=1"))
                if world == 1
                else self.action(out, "save_every=0")
            )
            assert finish(world, run, out.with_suffix(".txt")) == [0] * world, out
            if (
                marks.seen() > 2
            ):  # unread until now: take the pace from the file times of what it left
                lines = [
                    json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
                ]
                times = [line["time"] for line in lines if "loss" in line]
                self.pace = (times[-1] - times[0]) / (self.steps - 3)
            marks.close()
            self._whole[world] = outcome(out, self.steps)
        return self._whole[world]

    def resumed(self, world: int, out: Path, *more: str) -> bool:
        """Whether the run in `out` goes on to the weights and moments of the uninterrupted
        one, and leaves it tidy.
        """
        codes = finish(world, self.action(out, "save_every=7", *more), out.with_suffix(".txt"))
        if codes != [0] * world:
            return False
        tidy = not list(out.rglob(".tmp-*")) and not list(out.rglob(".old-*"))
        return tidy and outcome(out, self.steps) == self.whole(world)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """For the fast suite: runs of half the length."""
    return Place(tmp_path_factory.mktemp("faults"), 12, 24)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """For the campaigns."""
    return Place(tmp_path_factory.mktemp("campaign"), 24, 48)


# kill -9
# -----------------------------------------------------------------------------


def kills(place: Place, count: int, seed: int) -> dict[str, int]:
    """kill -9 at random moments of a run that saves after every step, beside the training and
    in its place in turn; every fifth run has two ranks, which die together."""
    chance, found = (
        random.Random(seed),
        {"good": 0, "inside_a_save": 0, "before_the_first": 0, "two_ranks": 0},
    )
    place.whole()
    done = 0
    while done < count:
        world, out, marks = 2 if done % 5 == 4 else 1, place.fresh("kill"), Marks()
        beside = "true" if done % 2 else "false"
        children = ranks(
            world,
            marks.steps(place.action(out, "save_every=1", f"async_save={beside}")),
            out.with_suffix(".txt"),
        )
        steps = world * chance.randrange(1, place.steps)
        while marks.seen() < steps and all(os.waitpid(c, os.WNOHANG) == (0, 0) for c in children):
            time.sleep(0.001)
        time.sleep(chance.random() * place.pace)
        for child in children:
            os.kill(child, KILL)
        codes = [wait(child) for child in children]
        marks.close()
        if codes != [-KILL] * world:
            continue  # it was faster than the signal; such a run says nothing
        done += 1
        newest, problems = disk.newest(out)
        found["inside_a_save"] += bool(list(out.glob("checkpoints/.tmp-*")))
        found["before_the_first"] += newest is None
        found["two_ranks"] += world == 2
        lost = (
            steps // world - 1 - (disk.step_of(newest) if newest else 0)
        )  # the mark stands before the step
        found["good"] += not problems and lost <= 2 and place.resumed(world, out)
    return found


def test_killed_runs_resume_to_the_same_bits(place: Place) -> None:
    assert kills(place, 6, 0)["good"] == 6


@pytest.mark.slow
def test_fifty_killed_runs_resume_to_the_same_bits(large: Place) -> None:
    found = kills(large, 50, 1)
    assert found["good"] == 50, found


# resume
# -----------------------------------------------------------------------------


def resumes(place: Place, world: int, points: list[tuple[int, int, int]]) -> int:
    """How many interrupted runs end as the uninterrupted one. Of two ranks one is hit, in
    turn; after a kill the other one ends by itself, as its peer is gone, or is killed too."""
    good = 0
    per_step = 4 // world  # micro-batches of a rank
    for turn, (step, micro, number) in enumerate(points):
        out, hit = place.fresh("resume"), str(turn % world)

        def event(hit: str = hit, number: int = number) -> None:
            if os.environ.get("RANK", "0") == hit:
                os.kill(os.getpid(), number)

        run = at_call(1 + step * per_step + micro, event, place.action(out, "save_every=4"))
        children = ranks(world, run, out.with_suffix(".txt"))
        codes = [wait(children.pop(int(hit)))]
        for child in children:
            if number == KILL:
                os.kill(child, KILL)
            codes.append(wait(child))
        newest, problems = disk.newest(out)
        at = disk.step_of(newest) if newest else 0
        if number == TERM:
            kept = codes == [75] * world and at == step + 1
        else:
            kept = codes[0] == -KILL and step - 8 <= at <= step
        good += kept and not problems and place.resumed(world, out)
    return good


def test_stopped_runs_resume_to_the_same_bits(place: Place) -> None:
    points = [(0, 1, KILL), (place.per_epoch - 1, 1, TERM), (place.steps - 1, 1, TERM)]
    assert resumes(place, 1, points) == 3


def elastic(
    place: Place, worlds: list[int], stops: list[int]
) -> tuple[list[Any], dict[int, float]]:
    """Rows of every step, in the order of their numbers, and unrounded losses, of a float64 run
    that is stopped before the given steps and goes on with another number of ranks."""
    out = place.fresh("elastic")
    out.mkdir()

    def segment(stop: int) -> None:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        batches, report, step = BatchPlan.shares, loop._report, loop.train_step
        where = out / f"seen-{rank}-{world}.jsonl"

        def summary(self: Any, k: int, w: int, limits: Any) -> Any:
            chosen = batches(self, k, w, limits)
            with where.open("a") as file:
                file.write(
                    json.dumps({"step": k, "rows": [x for part in chosen[rank] for x in part]})
                    + "\n"
                )
            return chosen

        def loss(run: Any, *rest: Any) -> None:
            if rank == 0:
                total, count = run.state.window["loss"]
                with (out / "losses.jsonl").open("a") as file:
                    file.write(json.dumps([run.state.step, (total / count).hex()]) + "\n")
            report(run, *rest)

        def stopping(run: Any) -> int:
            if run.state.step == stop - 1:
                os.kill(os.getpid(), TERM)
            return step(run)

        BatchPlan.waste, BatchPlan.shares = (lambda *a, **k: 0.0), summary  # type: ignore[method-assign, assignment]
        loop._report, loop.train_step = loss, stopping
        more = (f"steps={place.steps}", "dtype=float64", "save_every=0", "log_every=1")
        loop.fit(run_config(place.data, out, *SMALL, *more), faults.head_class("medusa"))

    for world, stop in zip(worlds, [*stops, place.steps + 1], strict=True):
        codes = finish(world, partial(segment, stop), out / "said")
        assert codes == [75 if stop <= place.steps else 0] * world, (out / "said").parent
    rows: dict[int, list[int]] = {}
    for world in set(worlds):
        parts = [
            [
                json.loads(line)
                for line in (out / f"seen-{r}-{world}.jsonl").read_text().splitlines()
            ]
            for r in range(world)
        ]
        for lines in zip(*parts, strict=True):
            k = lines[0]["step"]
            assert all(line["step"] == k for line in lines)
            step = sorted(row for line in lines for row in line["rows"])
            # Batches are made ahead, so a stopped segment has chosen a step that the next one
            # takes.
            assert rows.setdefault(k, step) == step
    losses = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert [k for k, _ in losses] == list(range(1, place.steps + 1))
    return [rows[k] for k in range(place.steps)], {k: float.fromhex(x) for k, x in losses}


def test_two_one_two_processes(place: Place) -> None:
    alone, changing = elastic(place, [1], []), elastic(place, [2, 1, 2], [5, 9])
    assert alone[0] == changing[0]
    assert max(abs(alone[1][k] - changing[1][k]) for k in alone[1]) <= 1e-9


# one rank dies
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("hit", [0, 1])
def test_who_outlives_a_killed_rank_says_so_explained(place: Place, hit: int) -> None:
    """Also where it is rank 0, which alone speaks otherwise, that is gone."""
    out, left = place.fresh("orphan"), 1 - hit

    def event() -> None:
        if os.environ["RANK"] == str(hit):
            os.kill(os.getpid(), KILL)

    said = out.with_suffix(".txt")
    children = ranks(2, at_call(4, event, place.action(out, "save_every=1")), said)
    codes = [wait(child) for child in children]
    assert (codes[hit], codes[left]) == (-KILL, 1)
    words = said.with_name(f"{said.name}.{left}").read_text().splitlines()
    assert "Traceback" not in "".join(words)
    assert words[-1].startswith("one of 2 processes is gone") and str(out) in words[-1]
    assert place.resumed(2, out)


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", True),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9", True),
        ("NCCL error in: X.cpp:1, remote process exited, ncclRemoteError: a call failed", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms", False),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_a_peer_that_is_gone_is_told_from_a_bug(words: str, gone: bool) -> None:
    assert is_peer_gone(RuntimeError(words)) == gone
    assert not is_peer_gone(ConnectionResetError(words))  # a hub, a tracker


def test_two_processes_on_one_gpu_are_told_in_a_line(tmp_path: Path) -> None:
    cfg = run_config(tmp_path / "data.jsonl", tmp_path / "run")
    words = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4e000"
    assert "num_processes" in str(explained(RuntimeError(words), cfg, 2))


# restarts
# -----------------------------------------------------------------------------


def restarts(place: Place, count: int, seed: int) -> int:
    """One of two ranks under torchrun's agent is killed at a random micro-batch; the agent
    starts both again.
    """
    chance, good = random.Random(seed), 0
    for turn in range(count):
        out, hit, call = (
            place.fresh("restart"),
            str(turn % 2),
            chance.randrange(2, 2 * place.steps + 1),
        )
        out.mkdir()

        def once(out: Path = out, hit: str = hit) -> None:
            if os.environ["RANK"] == hit and not (out / "killed").exists():
                (out / "killed").write_text("")
                os.kill(os.getpid(), KILL)

        run = at_call(call, once, place.action(out, "save_every=3"))
        code = wait(launcher(run, 3, out.with_suffix(".txt")))
        good += (
            code == 0 and (out / "killed").exists() and outcome(out, place.steps) == place.whole(2)
        )
    return good


def test_a_killed_rank_is_restarted_and_resumes(place: Place) -> None:
    assert restarts(place, 1, 0) == 1
