"""Waiting for the other ranks of a run without a collective, which would have a fixed
time-out."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch.distributed as dist

from outrider.conf.errors import UserError

PAUSE = 0.5  # seconds between two looks
TELL = 60.0  # seconds between two words about it
_meetings: Counter[tuple[int, str]] = Counter()


def nothing() -> None:
    """Heeds no signal."""


@contextlib.contextmanager
def main_first(
    name: str, minutes: float, check_stop: Callable[[], None] = nothing
) -> Iterator[None]:
    """Let rank 0 run the block, then the first rank of every other machine, then the rest,
    which find on disk what was done. minutes, check_stop: as in `meet`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    stage = bool(rank) + bool(rank and int(os.environ.get("LOCAL_RANK", "0")))
    for turn in range(stage):
        meet(f"{name} {turn}", minutes, check_stop)
    wait = False
    try:
        yield
        wait = True
    finally:  # after a mistake the others go on and meet it themselves
        for turn in range(stage, 2):
            meet(f"{name} {turn}", minutes, check_stop, wait)


def meet(
    name: str, minutes: float, check_stop: Callable[[], None] = nothing, wait: bool = True
) -> None:
    """Wait until every rank has come here, by looking at the store that they met at.

    minutes: how long at most, 0 = no limit; then UserError. check_stop: called while waiting.
    wait: False says that this rank was here, and goes on."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    place = (id(dist.group.WORLD), name)
    _meetings[place] += 1  # a new key at each meeting
    key = f"outrider/{name}/{_meetings[place]}"
    store.add(key, 1)
    begun = told = time.monotonic()
    while wait and int(store.add(key, 0)) < dist.get_world_size():
        check_stop()
        now = time.monotonic()
        if minutes and now > begun + 60 * minutes:
            raise UserError(
                f"data.wait: other ranks are still at their data after {minutes:g} minutes; look "
                "at them, or raise data.wait (0 = no limit)"
            )
        if now > told + TELL:
            told = now
            why = f"waiting: other ranks are still at their data ({(now - begun) / 60:.0f} minutes)"
            print(why, file=sys.stderr, flush=True)
        time.sleep(PAUSE)
