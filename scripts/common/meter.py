"""Progress of a synthesis on stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import TextColumn

from outrider.scripts.common.progress import Steps, columns

EVERY = 10.0  # seconds between two lines of a log


class Meter:
    """Conversations done of all, and tokens per second. Between two blocks the tokens spent tell
    how far the work is.

    guess: tokens of a conversation, until the first block is known.
    """

    def __init__(self, total: int, done: int, guess: int) -> None:
        self.total, self.first, self.done, self.tokens = total, done, done, 0
        self.started = time.monotonic()
        self.per_row = 1.0 * guess  # tokens spent for a finished conversation, junk included
        self.bar = Steps(
            *columns(10),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            every=EVERY,
        )
        self.task = self.bar.add_task("synthesize", total=total, completed=done, note="")

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def rate(self) -> float:
        """Tokens per second so far."""
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    def add(self, tokens: int) -> None:
        """Tokens just generated."""
        before, self.tokens = self.tokens, self.tokens + tokens
        if before // 100 != self.tokens // 100:
            likely = min(self.total, self.first + int(self.tokens / self.per_row))
            self._show(max(likely, self.done))

    def block(self, done: int) -> None:
        """A block is on disk; the file holds `done` conversations."""
        self.done = done
        self.per_row = max(1.0, self.tokens / max(1, done - self.first))  # 0: none was answered
        self._show(done)

    def _show(self, done: int) -> None:
        self.bar.update(self.task, completed=done, note=f"{self.rate():.0f} tokens/s")
