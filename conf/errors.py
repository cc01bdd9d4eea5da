"""The exceptions that an entry point turns into one line and an exit code instead of a
traceback.
"""

from __future__ import annotations

import contextlib
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
    """

    def __init__(
        self, message: str = "interrupted; run the same command again to continue", code: int = 130
    ):
        super().__init__(message)
        self.code = code


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 300 characters; its type where it says
    nothing."""
    return next(_filled(str(error)), type(error).__name__)


def last_line(output: str) -> str:
    """The last words of a process, in one line of at most 300 characters."""
    return ["no output", *_filled(output)][-1]


def _filled(text: str) -> Iterator[str]:
    return (line.strip()[:300] for line in text.splitlines() if line.strip())


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C in here says that the same command goes on; also a decorator."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None
