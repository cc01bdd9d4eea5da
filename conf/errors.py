"""The exceptions that an entry point turns into one line and an exit code instead of a
traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


class UserError(Exception):
    """A mistake the user can mend; exit code 2. The text is one line: "key or file:line: what;
    the fix".
    """


class CheckFailed(Exception):
    """A check found what it looks for; exit code 1. The text says what disagrees, and where to
    look.
    """


class Interrupted(Exception):
    """A graceful stop (Ctrl-C, SIGTERM, preemption): the work so far is saved.

    code: exit code of the process, 130 after Ctrl-C, 75 where the same command should be
        started again.
    everywhere: every process of the run says it, not rank 0 alone, which may be gone.
    """

    def __init__(
        self,
        message: str = "interrupted; run the same command again to continue",
        code: int = 130,
        everywhere: bool = False,
    ):
        super().__init__(message)
        self.code = code
        self.everywhere = everywhere


def first_line(error: BaseException) -> str:
    """Return what an exception says, in one line of at most 300 characters; its type where
    it says nothing."""
    lines = (line.strip()[:300] for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C and SIGTERM in here end the work at once and say that the same command goes on; also
    a decorator. Outside the main thread SIGTERM stays what it was."""
    owner, requested = os.getpid(), list[int]()

    def stop(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked child, whose end is nobody's news
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        requested.append(number)
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if here else None
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(code=75 if requested else 130) from None
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)
