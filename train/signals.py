"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 ask a run to stop after the step it is in; a second one
stops it at once.

A launcher may pass on a signal that the process has had already (a terminal's Ctrl-C, a
scheduler that signals every process): what comes within a second of the first is the same
wish.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from outrider.conf.errors import Interrupted
from outrider.train.launch import follow

# 75: start it again
CODES = {
    signal.SIGINT: 130,
    signal.SIGTERM: 75,
    signal.SIGUSR1: 75,
    signal.SIGUSR2: 75,
}
ECHO = 1.0  # seconds


class Stop:
    """Context that turns signals into a flag. `requested`: the signal number, 0 while none came.
    `over`: all is saved, and a launcher that ends the ranks behind the first one stops nothing;
    whatever comes first then is passed over, and what comes a second later ends the process."""

    def __init__(self) -> None:
        self.requested, self.over, self._heard = 0, False, 0.0
        self._leaving = False  # a signal came after that
        self._parent = os.getppid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in CODES:
            self._before[number] = signal.signal(number, self._hear)
        follow()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.over and not self._leaving:
            self._leaving, self._heard = True, time.monotonic()
            return
        requested = self.requested or self.over
        if requested and os.getppid() != self._parent:
            return  # Ctrl-C reached the launcher too, and the news of its death is no second wish
        if requested and time.monotonic() < self._heard + ECHO:
            return
        if requested:
            os._exit(CODES[signal.Signals(number)])
        self.requested, self._heard = number, time.monotonic()
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # a full disk behind stderr
                print(
                    "stopping after this step; once more to stop at once",
                    file=sys.stderr,
                    flush=True,
                )


def interruption(number: int, step: int, saved: bool) -> Interrupted:
    """The exception that ends a run stopped by signal `number` after `step`."""
    code = CODES.get(signal.Signals(number), 75) if number else 75
    text = f"stopped at step {step}" + (", saved" if saved else ", nothing to save yet")
    return Interrupted(f"{text}; the same command continues", code)
