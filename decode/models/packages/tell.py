"""How far a download or a conversion is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from outrider.conf import disk
from outrider.decode.models.packages.table import PackagedTarget

LINES = 4  # of a download or a conversion where there is no terminal


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
