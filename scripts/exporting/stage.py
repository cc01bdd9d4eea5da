"""The folder that an export is written in: whole in its place, or nothing of it stays."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.conf.disk import size
from outrider.conf.errors import UserError
from outrider.heads.checkpoint import recover, staged
from outrider.heads.interop import MANIFEST, exported

MARK = ".outrider-export"  # held by the process that writes the folder
STAGE = ".tmp-"  # of heads.checkpoint.staged
FRACTION = 1.02  # of what the weights take: card, manifest, contract


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `out` when the block ends well.
    Otherwise it vanishes at once, whatever stopped the block; what a killed process left
    goes with the next `sweep`."""
    with contextlib.ExitStack() as held:
        with staged(out) as stage:
            mark = held.enter_context(open(stage / MARK, "w"))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield stage
        (out / MARK).unlink()


def sweep(folder: Path) -> None:
    """Remove what killed exports left in `folder`, for whatever place beside it they were
    meant. Those that a living process writes stay, and where locks cannot tell, all do."""
    for mark in folder.glob(f"*/{MARK}"):
        with contextlib.suppress(OSError), open(mark, "r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            out = folder / mark.parent.name.removeprefix(STAGE)
            recover(out)
            (out / MARK).unlink(missing_ok=True)


def free_place(out: Path, overwrite: bool) -> Path:
    """`out`, if it may be written. Raises UserError for a folder that exists, unless it is an
    export to be replaced.
    """
    if not out.parent.exists() or out.parent.is_dir():
        recover(out)
        sweep(out.parent)
    if not out.exists() and not out.is_symlink():
        return out
    if not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    if not any(out.iterdir()):
        return out
    if not overwrite:
        raise UserError(
            f"out: {out} exists; set overwrite=true to replace it as a whole, or give "
            "another folder"
        )
    if exported(out) is None:
        raise UserError(
            f"out: {out} holds files that are no export (no {MANIFEST}); overwrite=true "
            "would delete them "
            "all: give another folder"
        )
    return out


def check_room(out: Path, needed: int, fix: str) -> None:
    """Raises UserError where the disk of `out` has no room for so many bytes of weights.
    fix: what makes them fewer, "" where nothing does."""
    folder = next(p for p in (out.absolute(), *out.absolute().parents) if p.is_dir())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed * FRACTION > free:
        raise UserError(
            f"out: {out} needs {size(needed)}, and {folder} has {size(free)} left; free some space"
            f"{fix and f', set {fix},'} or give another folder"
        )


def visible(stage: Path) -> list[Path]:
    """The files of an export, by name, without the mark."""
    return sorted(path for path in stage.iterdir() if path.name != MARK)
