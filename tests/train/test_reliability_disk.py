"""Damaged files and refusing disks: 0 silent uses, 0 lost runs. The slow tests run all of it
and record the figures.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from outrider.conf.errors import UserError
from outrider.heads import checkpoint as heads_checkpoint
from outrider.heads import load_head
from outrider.train import loop
from outrider.train import state as disk
from tests.helpers.faults import finish, fork, outcome, train, wait
from tests.helpers.training import chats, tiny_target
from tests.train.test_features import opened, written

STEPS, FULL, SPACE = (
    16,
    6,
    13,
)  # the disk is full from step FULL on, and has space again from step SPACE on
SMALL = (f"steps={STEPS}", "log_every=1", "save_every=4")


class Place:
    """A finished run with three checkpoints, a head and a feature cache, and what reads each."""

    def __init__(self, folder: Path) -> None:
        os.environ["OUTRIDER_CACHE"] = str(folder / "cache")
        self.folder, self.data, self.out = folder, chats(folder / "data.jsonl"), folder / "run"
        assert finish(
            1, partial(train, self.data, self.out, *SMALL, "keep=3"), folder / "said"
        ) == [0]
        self.whole = outcome(self.out, STEPS)
        self.target = tiny_target()
        self.writer = written(self.data, folder / "features")
        self.newest = disk.checkpoints(self.out)[0]
        self.readers: dict[Path, Callable[[Path], str]] = {}
        for name in (disk.WEIGHTS, disk.CARD, disk.OPTIMIZER, disk.STATE, disk.MANIFEST):
            self.readers[self.newest / name] = self.checkpoint
        for name in (disk.WEIGHTS, disk.CARD):
            self.readers[self.out / "head" / name] = partial(
                self.refusal, lambda: load_head(self.out / "head", self.target)
            )
        for file in sorted((folder / "features").glob("*.safetensors")) + [
            folder / "features" / "manifest.json"
        ]:
            self.readers[file] = partial(self.refusal, lambda: opened(self.writer))

    def checkpoint(self, file: Path) -> str:
        """What is said of the newest checkpoint, once the one before it is taken in its place."""
        found, problems = disk.newest(self.out)
        return problems[0] if found == disk.checkpoints(self.out)[1] and len(problems) == 1 else ""

    @staticmethod
    def refusal(read: Callable[[], Any], file: Path) -> str:
        try:
            read()
        except UserError as error:
            return str(error)
        return ""

    def refused(self, file: Path, content: bytes | None) -> bool:
        """Whether a reader that finds `content` in a file (None: no file) refuses it and names
        it.
        """
        good = file.read_bytes()
        try:
            file.unlink() if content is None else file.write_bytes(content)
            said = self.readers[file](file)
        finally:
            file.write_bytes(good)
        gone = content is None and file.name == "manifest.json" and "features" in str(file)
        return said.startswith(f"{file}: ") or (gone and str(file.parent) in said)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("disk")
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield Place(folder)


# damaged files
# -----------------------------------------------------------------------------


def flips(place: Place, count: int, seed: int) -> int:
    """How many single-bit flips at random places of random files are refused."""
    chance, files, good = random.Random(seed), list(place.readers), 0
    for turn in range(count):
        file = files[turn % len(files)]
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        good += place.refused(file, bytes(content))
    return good


def cuts(place: Place) -> tuple[int, int]:
    """(refused, all) of every file cut to 0, 1, half and all but one of its bytes, gone, or a
    byte longer.
    """
    found = []
    for file in place.readers:
        size, content = file.stat().st_size, file.read_bytes()
        found += [place.refused(file, content[:n]) for n in (0, 1, size // 2, size - 1)]
        found += [place.refused(file, None), place.refused(file, content + b"\0")]
    return sum(found), len(found)


def test_damaged_files_are_refused_by_name(place: Place) -> None:
    assert flips(place, 48, 0) == 48
    assert cuts(place) == (72, 72)
    assert all(not place.readers[file](file) for file in place.readers), "what is whole is read"


@pytest.mark.slow
def test_two_hundred_flips_and_every_cut_are_refused(place: Place) -> None:
    flipped, (cut, every) = flips(place, 200, 1), cuts(place)
    resumed = 0
    for file in [f for f in place.readers if f.parent == place.newest]:
        out = place.folder / f"again-{file.name}"
        shutil.copytree(place.out, out)
        shutil.rmtree(out / "head")
        bad = out / "checkpoints" / place.newest.name / file.name
        bad.write_bytes(bad.read_bytes()[:-1] + b"?")
        resumed += finish(1, partial(train, place.data, out, *SMALL), out / "said") == [0] and (
            outcome(out, STEPS) == place.whole
        )
    met = (flipped, cut, resumed) == (200, every, 5)
    assert met, (flipped, cut, every, resumed)


# a full disk
# -----------------------------------------------------------------------------


def watched(out: Path, fill: Callable[[], None], empty: Callable[[], None]) -> None:
    """In the child: the disk fills before step FULL and has space again before step SPACE;
    whenever a save ends, what the next start would take is noted."""
    step, save = loop.train_step, disk.save

    def stepping(run: Any) -> int:
        change = {FULL: fill, SPACE: empty}.get(run.state.step)
        if change:
            for thread in threading.enumerate():  # the save before belongs to the time before
                if thread.name == "save":
                    thread.join()
            change()
        return step(run)

    def saving(folder: Path, snapshot: Any) -> Path:
        try:
            return save(folder, snapshot)
        finally:
            newest, problems = disk.newest(folder)
            notes.append([snapshot.step, disk.step_of(newest) if newest else 0, problems])

    notes: list[Any] = []
    loop.train_step, disk.save = stepping, saving  # type: ignore[assignment]
    try:
        train_small(out)
    finally:
        empty()
        (out / "notes.json").write_text(json.dumps(notes))


def train_small(out: Path) -> None:
    train(out.parent / "data.jsonl", out, *SMALL)


def survived(place: Place, out: Path, code: int, failed: bool = True) -> bool:
    """The run ended well and as the undisturbed one; the saves of the full disk failed and
    left the newest checkpoint as it was; no line of metrics is missing."""
    notes = json.loads((out / "notes.json").read_text())
    newest = [[4, 4], [8, 4], [12, 4], [16, 16]] if failed else [[4, 4], [8, 8], [12, 12], [16, 16]]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    whole = [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    return (
        code == 0
        and [n[:2] for n in notes] == newest
        and not any(n[2] for n in notes)
        and whole
        and outcome(out, STEPS) == place.whole
        and not list(out.rglob(".tmp-*"))
    )


def refusing(out: Path, after: int) -> None:
    """In the child: while the disk is full, a save may do `after` operations (write, sync,
    rename); the next one fails in the middle, as do all that follow."""
    state = {"full": False, "left": 0}
    write_text, save_file, sync, rename, save = (
        Path.write_text,
        disk.save_file,
        heads_checkpoint.sync,
        os.rename,
        disk.save,
    )

    def refuse() -> bool:
        state["left"] -= state["full"]
        return bool(state["full"] and state["left"] < 0)

    def writing(self: Path, text: str, *rest: Any, **more: Any) -> int:
        if ".tmp-" in str(self) and refuse():
            write_text(self, text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(self, text, *rest, **more)

    def saving_file(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        if refuse():
            os.truncate(path, path.stat().st_size // 2)
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    def syncing(path: Path) -> None:
        if refuse():
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    def renaming(*args: Any) -> None:
        if refuse():
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(*args)

    def starting(folder: Path, snapshot: Any) -> Path:
        state["left"] = after
        return save(folder, snapshot)

    Path.write_text, disk.save_file, os.rename = writing, saving_file, renaming  # type: ignore[method-assign, assignment]
    heads_checkpoint.sync, disk.save = syncing, starting  # type: ignore[assignment]
    watched(out, lambda: state.update(full=True), lambda: state.update(full=False))


def limited(out: Path, limit: int) -> None:
    """In the child: no file may grow beyond `limit` bytes while the disk is full."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    watched(
        out,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard)),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
    )


def mounted(out: Path, left: int) -> None:
    """In the child: a file system of its own, which another file fills up to `left` bytes.
    Root alone can do that.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(out)], check=True)
    disk.MARGIN = -(1 << 40)  # the look at the free space would spare the writes

    def fill() -> None:
        with (out / "ballast").open("wb") as file:
            file.write(b"\0" * (shutil.disk_usage(out).free - left))

    try:
        watched(out, fill, lambda: (out / "ballast").unlink(missing_ok=True))
    finally:
        shutil.copytree(out, out.with_name(out.name + "-kept"))


def can_mount() -> bool:
    line = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(line, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


OPERATIONS = 13  # of a save: 2 tensor files, 3 JSON files, 5 + 1 + 1 syncs, a rename


def full(place: Place, name: str, action: Callable[[Path], None], failed: bool = True) -> bool:
    out = place.folder / name
    code = wait(fork(partial(action, out), place.folder / f"{name}.txt"))
    kept = out.with_name(out.name + "-kept")
    return survived(place, kept if kept.exists() else out, code, failed)


def test_a_full_disk_leaves_the_newest_checkpoint_and_the_run_goes_on(place: Place) -> None:
    assert full(place, "refused", partial(refusing, after=7))
    assert full(place, "limited", partial(limited, limit=2000))


@pytest.mark.slow
def test_a_disk_that_is_full_at_every_write_of_a_save(place: Place) -> None:
    # after the rename, when the last sync fails, the checkpoint is there: new and sound
    operations = [
        full(place, f"op{n}", partial(refusing, after=n), n < OPERATIONS - 1)
        for n in range(OPERATIONS)
    ]
    none = full(place, "none", partial(refusing, after=OPERATIONS), failed=False)
    sizes = {p.stat().st_size for p in place.newest.iterdir() if p.suffix == ".safetensors"}
    limits = sorted({1, *(n for s in sizes for n in (s // 100, s // 10, s // 2, s - 1))})
    files = [full(place, f"size{n}", partial(limited, limit=n)) for n in limits]
    total = sum(p.stat().st_size for p in place.newest.iterdir())
    rooms = [total * k // 8 // 4096 * 4096 for k in range(8)] if can_mount() else []
    disks = [full(place, f"disk{n}", partial(mounted, left=n)) for n in rooms]
    met = none and all(operations) and all(files) and all(disks)
    assert met, (
        operations,
        none,
        dict(zip(limits, files, strict=True)),
        dict(zip(rooms, disks, strict=True)),
    )
