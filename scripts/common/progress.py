"""Progress of long work: a bar on a terminal, a plain line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich import get_console
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY = 30.0  # seconds


class Steps(Progress):
    """rich's Progress with name, bar, done of all, time spent and left, and `more`; where its
    console is no terminal, a line "NAME: DONE of ALL" on stderr every EVERY seconds instead."""

    def __init__(
        self,
        *more: ProgressColumn,
        console: Console | None = None,
        quiet: bool = False,
        transient: bool = False,
    ) -> None:
        console = console or get_console()
        self.plain, self.told = not quiet and not console.is_terminal, time.monotonic()
        shown = (
            TextColumn("[bold]{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        disable = quiet or self.plain
        super().__init__(*shown, *more, console=console, disable=disable, transient=transient)
        self.parts: dict[str, TaskID] = {}

    def update(self, task_id: TaskID, **kwargs: Any) -> None:  # type: ignore[override]
        """As rich does, and say it where a line is due."""
        super().update(task_id, **kwargs)
        if self.plain and time.monotonic() - self.told >= EVERY:
            task, self.told = self._tasks[task_id], time.monotonic()
            done = f"{task.completed:.0f} of {task.total or 0:.0f}"
            print(f"{task.description}: {done}", file=sys.stderr, flush=True)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As rich does, and say it where a line is due."""
        self.update(task_id, advance=advance)

    def part(self, done: int, total: int, name: str) -> None:
        """Show how far a part of the work is, each as a task of its own."""
        if name not in self.parts:
            self.parts[name] = self.add_task(name, total=total)
        self.update(self.parts[name], completed=done)


OnProgress = Callable[[int, int, str], None]  # done, of all, the name of the part that is done


def silent(*_: object) -> None:
    """Nobody looks on."""
