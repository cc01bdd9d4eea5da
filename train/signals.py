"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 ask a run to stop after the step it is in; a second one
stops it at once.

A launcher may pass on a signal that the process has had already (a terminal's Ctrl-C, a
scheduler that signals every process): what comes within a second of the first is the same
wish. `accelerate launch` passes no signal on, and torchrun neither SIGUSR1 nor SIGUSR2, so a
rank asks the kernel for a SIGTERM when its launcher dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from outrider.conf.errors import Interrupted

# 75: start it again
CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGUSR2: 75}
ECHO = 1.0  # seconds
# `accelerate launch`, as a script and as `python -m`
COMMANDS = (
    *("accelerate", "accelerate-launch"),
    *("accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
)


class Stop:
    """Context that turns signals into a flag. `requested`: the signal number, 0 while none
    came. `heeded`: somebody looks at it; where nobody does yet, a signal is a Ctrl-C. `over`:
    all is saved, and a launcher that ends the ranks behind the first one stops nothing;
    whatever comes first then is passed over, and what comes a second later ends the
    process."""

    def __init__(self) -> None:
        self.requested, self.heeded, self.over, self._heard = 0, True, False, 0.0
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

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """End the block by Interrupted where a signal comes: there is nothing to be saved."""
        self.heeded = False
        try:
            yield
        except KeyboardInterrupt:
            raise interruption(self.requested, 0) from None
        finally:
            self.heeded = True

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
        if not self.heeded:
            raise KeyboardInterrupt
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # a full disk behind stderr
                said = "stopping after this step; once more to stop at once"
                print(said, file=sys.stderr, flush=True)


def interruption(number: int, step: int) -> Interrupted:
    """Return the exception that ends a run stopped by signal `number` after `step`, saved."""
    code = CODES.get(signal.Signals(number), 75) if number else 75
    text = f"stopped at step {step}" + (", saved" if step else ", nothing to save yet")
    return Interrupted(f"{text}; the same command continues", code)


def follow() -> None:
    """Ask for a SIGTERM when the launcher of this process dies, where there is one."""
    if sys.platform == "linux" and (waiting_launcher() or "TORCHELASTIC_RUN_ID" in os.environ):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def waiting_launcher() -> int:
    """Process id of an `accelerate launch` that started this process and no other; 0 if there
    is none.
    """
    if sys.platform != "linux" or "RANK" in os.environ:
        return 0
    parent = os.getppid()
    return 0 if launch_words(parent) is None else parent


def agent() -> int:
    """Process id of the torchrun or `accelerate launch` that started this process as one of
    several; 0 if there is none."""
    parent = os.getppid()
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    words = _words(parent)[:3]
    own = any(os.path.basename(w) in ("torchrun", "torch.distributed.run") for w in words)
    return parent if own or launch_words(parent) is not None else 0


def _words(process: int) -> list[str]:
    """Return the words of a process's command, [] where they cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []


def launch_words(process: int) -> list[str] | None:
    """Return the words behind `accelerate launch` where that is a process's command; else None."""
    words = _words(process)
    for at, word in enumerate(words[:3], 1):
        if os.path.basename(word) in COMMANDS:
            return words[at + (words[at : at + 1] == ["launch"]) :]
    return None
