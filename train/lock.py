"""One run per folder: a lock that dies with its process, and notices when the folder was taken
away under it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.conf.errors import UserError

NAME = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
WITHOUT = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # file systems that know no locks


class Lock:
    """The held run folder."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError when another run has the folder, or it cannot be written."""
        self.folder, self._handle = folder, -1
        try:
            self._take()
        except OSError as error:
            raise UserError(
                f"out_dir: cannot write to {folder} ({error.strerror}); choose another folder"
            ) from None

    def _take(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                os.close(handle)
                raise UserError(
                    f"out_dir: another run is writing to {self.folder}; wait for it or choose "
                    "another folder"
                ) from None
            if error.errno not in WITHOUT:
                os.close(handle)
                raise
            print(
                f"out_dir: {self.folder} lies on a file system without locks; start no "
                "second run there",
                file=sys.stderr,
                flush=True,
            )
        self.close()
        self._handle = handle

    def renew(self) -> None:
        """Hold the folder again if it was removed or moved away meanwhile: a new folder of
        that name is another one.

        Raises UserError when another run was started there, OSError when it cannot be written.
        """
        try:
            there, mine = os.stat(self.folder / NAME), os.fstat(self._handle)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return
        except FileNotFoundError:
            pass
        self._take()

    def close(self) -> None:
        """Let go."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the run folder. Raises as Lock does."""
    lock = Lock(folder)
    try:
        yield lock
    finally:
        lock.close()
