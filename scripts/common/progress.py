"""Progress of long work: a bar on a terminal; in a log file, where a bar shows nothing, a
plain line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

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


def columns(width: int) -> tuple[ProgressColumn, ...]:
    """Return what a bar shows: name, bar, done of all, time spent, time left."""
    return (
        TextColumn(f"[bold]{{task.description:<{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )


class Steps(Progress):
    """rich's Progress that also writes "NAME: DONE of ALL, TIME so far, about TIME left" to
    stderr every `every` seconds of work, where its console is no terminal. A task's fields
    `name` and `note` stand in the line, the description instead of a missing name. A task that
    goes on with earlier work takes its pace from its own."""

    def __init__(
        self,
        *shown: ProgressColumn | str,
        console: Console | None = None,
        quiet: bool = False,
        transient: bool = False,
        every: float = EVERY,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        console = console or get_console()
        self.plain = not quiet and not console.is_terminal
        # Without a terminal a transient bar would leave nothing but an empty line.
        super().__init__(
            *shown,
            console=console,
            disable=quiet or (self.plain and transient),
            transient=transient,
        )
        self.every, self.now, self.last = every, now, now()
        self.began: dict[TaskID, tuple[float, float]] = {}
        self.reported: set[TaskID] = set()

    def add_task(self, *args: Any, **kwargs: Any) -> TaskID:
        """As rich does; the clock of the task starts."""
        task = super().add_task(*args, **kwargs)
        self.began[task] = (self.now(), self._tasks[task].completed)
        return task

    def update(self, task_id: TaskID, **kwargs: Any) -> None:  # type: ignore[override]
        """As rich does, and say it where a line is due."""
        super().update(task_id, **kwargs)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As rich does, and say it where a line is due."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        task, now = self._tasks[task_id], self.now()
        if not self.plain or not task.total:
            return
        finished = task.completed >= task.total
        due = task_id in self.reported if finished else now - self.last >= self.every
        if not due:
            return
        start, before = self.began[task_id]
        done, spent = task.completed - before, now - start
        note = f" ({task.fields['note']})" if task.fields.get("note") else ""
        name = task.fields.get("name") or task.description
        line = f"{name}: {task.completed:.0f} of {task.total:.0f}{note}, {clock(spent)} so far"
        if done > 0 and not finished:
            line += f", about {clock(spent * (task.total - task.completed) / done)} left"
        (self.reported.discard if finished else self.reported.add)(task_id)
        self.last = now
        print(line, file=sys.stderr, flush=True)


class OnProgress(Protocol):
    """What long work calls as it goes on. total: 0 where it is not known. name: of the part that
    is done, where there are several."""

    def __call__(self, done: int, total: int, name: str = "", /) -> None: ...


def silent(done: int, total: int, name: str = "", /) -> None:
    """Nobody looks on."""


def named(on_progress: OnProgress, name: str) -> OnProgress:
    """Return the same for a part of the work, which does not know its own name."""
    return lambda done, total, _="", /: on_progress(done, total, name)


def by_name(bar: Progress) -> OnProgress:
    """Shows every part as a task of `bar`."""
    tasks: dict[str, TaskID] = {}

    def on_progress(done: int, total: int, name: str = "", /) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=total or None, completed=done)
        bar.update(tasks[name], completed=done, total=total or None)

    return on_progress


def clock(seconds: float) -> str:
    """45 s, 3:07 min, 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
