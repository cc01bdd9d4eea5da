"""Files that are whole or not there: staged beside their name, synced, renamed."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from outrider.conf.errors import UserError

_numbers = itertools.count()


def sync(path: Path) -> None:
    """fsync a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when the block ends well: a reader
    sees the old file or the new one, also after a power cut. Nothing else is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Cut: names may be as long as a file's can be. Numbered: blocks may stand in each other.
    stage = path.with_name(f".tmp-{path.name[:40]}-{os.getpid()}-{next(_numbers)}")
    try:
        yield stage
        sync(stage)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, see `whole`."""
    with whole(path) as stage:
        stage.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text` in UTF-8, see `whole`."""
    with whole(path) as stage:
        stage.write_text(text, encoding="utf-8", newline="")


def size(count: float) -> str:
    """Return bytes for people: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}".replace(".0 ", " ")
        count /= 1000
    return f"{count:,.1f} TB"


def check_space(key: str, folder: Path, need: float, fix: str = "give another folder") -> None:
    """Raise UserError where `need` bytes are not free on the disk of `folder`, which need
    not be there yet. key: which names it. fix: what to do beside freeing space."""
    near = folder.absolute()
    while not near.exists():
        near = near.parent
    free = shutil.disk_usage(near).free
    if free < need:
        raise UserError(
            f"{key}: {near} has {size(free)} free, {size(need)} are needed; free space there "
            f"or {fix}"
        )
