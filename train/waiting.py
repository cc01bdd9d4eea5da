"""Waiting for the other ranks of a run without a collective, which would have a fixed
time-out: to tokenize may take hours."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

PAUSE = 0.5  # seconds between two looks
_meetings: Counter[tuple[int, str]] = Counter()


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """Let rank 0 run the block, then the first rank of every other machine, then the rest,
    which find on disk what was done."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    stage = bool(rank) + bool(rank and int(os.environ.get("LOCAL_RANK", "0")))
    for turn in range(stage):
        barrier(f"{name} {turn}")
    wait = False
    try:
        yield
        wait = True
    finally:  # after a mistake the others go on to it themselves
        for turn in range(stage, 2):
            barrier(f"{name} {turn}", wait)


def wait_for(path: Path) -> None:
    """Wait until a file is there, and say so once."""
    if not path.is_file() and os.environ.get("RANK", "0") == "0":
        print(f"waiting for {path}", file=sys.stderr, flush=True)
    while not path.is_file():
        time.sleep(PAUSE)


def barrier(name: str, wait: bool = True) -> None:
    """Wait until every rank has come here, by looking at the store that they met at. wait:
    False says that this rank was here, and goes on."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    place = (id(dist.group.WORLD), name)
    _meetings[place] += 1  # a new key at each meeting
    key = f"outrider/{name}/{_meetings[place]}"
    store.add(key, 1)
    while wait and int(store.add(key, 0)) < dist.get_world_size():
        time.sleep(PAUSE)
