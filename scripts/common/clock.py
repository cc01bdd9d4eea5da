"""The clock of everything that is timed on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds, after the device has done its work."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
