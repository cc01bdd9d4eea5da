"""Progress of a synthesis on stderr."""

from __future__ import annotations

import sys
import time


class Meter:
    """Progress on stderr: a bar on a terminal, else a line per block. Counts conversations,
    tokens/s, time left."""

    def __init__(self, total: int, done: int, guess: int, every: float = 0.0):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self.total, self.first, self.done, self.tokens = total, done, done, 0
        self.console = Console(stderr=True)
        self.started = self.told = time.monotonic()
        self.every = every  # at least so many seconds between two lines
        self.per_row = 1.0 * guess  # tokens spent for a finished conversation, junk included
        self.bar = Progress(
            TextColumn("synthesize"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=total, completed=done, rate="")

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def rate(self) -> str:
        """Tokens per second and time left, in words."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        text = f"{self.tokens / elapsed:.0f} tokens/s"
        left = (
            max(0.0, (self.total - self.first) * self.per_row - self.tokens)
            * elapsed
            / max(1, self.tokens)
        )
        text += f", {int(left) // 60}:{int(left) % 60:02d} left"
        return text

    def add(self, tokens: int) -> None:
        """Tokens just generated."""
        before, self.tokens = self.tokens, self.tokens + tokens
        if before // 100 != self.tokens // 100:
            now = min(self.total, self.first + int(self.tokens / self.per_row))
            self.bar.update(self.task, completed=max(now, self.done), rate=self.rate())

    def block(self, done: int) -> None:
        """A block is on disk; the file holds `done` conversations."""
        self.done = done
        self.per_row = self.tokens / max(1, done - self.first)
        self.bar.update(self.task, completed=done, rate=self.rate())
        if not self.console.is_terminal and (
            time.monotonic() - self.told >= self.every or done == self.total
        ):
            self.told = time.monotonic()
            print(
                f"synthesize: {done}/{self.total} conversations, {self.rate()}",
                file=sys.stderr,
                flush=True,
            )
