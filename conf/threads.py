"""How OpenMP threads of a process that is started now wait for each other.

A pass over a few tokens is some hundred short parallel regions. A thread that sleeps between
two of them has to be woken, which on two idle cores doubles the time of the matrix products; a
thread that spins starves whoever shares its core (docs/internals/experiments.md). So they spin, as
OpenMP's do by default, where the processors are idle, and sleep soon where other work runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

SPINS = "GOMP_SPINCOUNT"
SLEEPY = {SPINS: "1000"}
CHOSEN = (SPINS, "OMP_WAIT_POLICY")  # by the user
LOOKS, PAUSE = 7, 0.005  # seconds between two looks
SHARE = 8  # of so many processors one may be taken


def waiting(environment: Mapping[str, str], processes: int = 1) -> dict[str, str]:
    """What to add to the environment of a program that is started now, as so many processes on
    this machine; nothing where the user has chosen."""
    if any(name in environment for name in CHOSEN):
        return {}
    return dict(SLEEPY) if processes > 1 or shared() else {}


def shared() -> bool:
    """Whether other work runs on this machine's processors right now. False where it cannot be
    known."""
    return others() >= max(1, (os.cpu_count() or 1) // SHARE)


def others() -> int:
    """How many threads beside this one want a processor, the median of a few looks; 0 where this
    system does not say."""
    found = []
    for _ in range(LOOKS):
        try:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        except (OSError, IndexError):
            return 0
        found.append(int(running) - 1)
        time.sleep(PAUSE)
    return int(statistics.median(found))
