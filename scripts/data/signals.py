"""Ctrl-C and SIGTERM during a synthesis."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.conf.errors import Interrupted


class Signals:
    """Ends a run at once while nothing is under way, or on the second signal; otherwise at the next
    token. An exception out of a handler may come between file and count, and is lost where a
    destructor runs.

    held: conversations on file. drawing: whether `check_stop` is called at every token. cancel:
    called in the handler in place of all this, for a run that waits in an event loop."""

    def __init__(self, path: Path) -> None:
        self.path, self.held, self.drawing, self.requested = path, 0, False, 0
        self.cancel: Callable[[], Any] | None = None

    def __enter__(self) -> Signals:
        self.before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        again, self.requested = self.requested, number
        if self.cancel is not None:
            if not again:
                self.cancel()
        elif again or not self.drawing:
            self.check_stop()

    def check_stop(self) -> None:
        """Raise Interrupted (130 after Ctrl-C, 75 after SIGTERM) where a signal has come."""
        if self.requested:
            raise Interrupted(
                f"interrupted: {self.path} holds {self.held} conversations; the same command "
                "continues",
                code=130 if self.requested == signal.SIGINT else 75,
            )
