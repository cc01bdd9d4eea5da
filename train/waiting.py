"""Waiting for other processes without a collective, which would have a fixed time-out: for a turn
at a file of the cache folder, and for all ranks to have come so far.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from filelock import FileLock, Timeout

from outrider.conf.errors import UserError
from outrider.decode.models.identity import cache_root

PAUSE = 0.5  # seconds between two looks
TELL = 60.0  # seconds between two words about it


def nothing() -> None:
    """Heeds no signal."""


@contextlib.contextmanager
def turn(name: str, minutes: float, check_stop: Callable[[], None] = nothing) -> Iterator[None]:
    """Hold the lock `name` of the cache folder: one process at a time does what others then find
    done. The lock of a process that ends is free. Without a file system that can lock all go on
    at once, which is slow and does no harm.

    minutes: how long to wait at most, 0 = no limit; then UserError. check_stop: called while
    waiting.
    """
    path = cache_root() / "locks" / f"{name}.lock"
    lock = FileLock(path)
    held = False
    try:
        patience = _Patience(minutes, f"another process holds {path}", check_stop)
        while not held:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
                held = True
            except Timeout:
                patience.wait()
            except (OSError, RuntimeError):  # filelock says so where a file system cannot lock
                break
        yield
    finally:
        if held:
            lock.release()


def meet(name: str, minutes: float, check_stop: Callable[[], None] = nothing) -> None:
    """Wait until every rank has come here, by looking at the store that they met at. minutes,
    check_stop: as in `turn`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    key = f"outrider/{name}/{_counted(name)}"
    store.add(key, 1)
    patience = _Patience(minutes, "other ranks are still at their data", check_stop)
    while int(store.add(key, 0)) < dist.get_world_size():
        patience.wait()


_meetings: dict[tuple[int, str], int] = {}


def _counted(name: str) -> int:
    """A number that is new at each meeting of this process group."""
    key = (id(dist.group.WORLD), name)
    _meetings[key] = _meetings.get(key, 0) + 1
    return _meetings[key]


class _Patience:
    """Pauses that end with UserError after `minutes`, 0 = never; now and then a word of `why`."""

    def __init__(self, minutes: float, why: str, check_stop: Callable[[], None]) -> None:
        self.begun = self.reported = time.monotonic()
        self.minutes, self.why, self.check_stop = minutes, why, check_stop

    def wait(self) -> None:
        """One pause."""
        self.check_stop()
        now = time.monotonic()
        if self.minutes and now > self.begun + 60 * self.minutes:
            raise UserError(
                f"data.wait: {self.why} after {self.minutes:g} minutes; look at it, or raise "
                "data.wait (0 = no limit)"
            )
        if now > self.reported + TELL and os.environ.get("LOCAL_RANK", "0") in ("0", "1"):
            self.reported = now
            spent = (now - self.begun) / 60
            print(f"waiting: {self.why} ({spent:.0f} minutes)", file=sys.stderr, flush=True)
        time.sleep(PAUSE)
