"""Where the host may ask a tensor for a value.

On a CPU that is free, and loops end as soon as nobody is left. On an accelerator every question
waits for the device, so the code runs on with masks instead. Both ways give the same tokens;
the tests walk the second one on CPUs by patching `on_cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_cpu(tensor: Tensor) -> bool:
    """Return whether reading `tensor` on the host waits for nothing."""
    return tensor.device.type == "cpu"


def send(values: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Return values of the host as a tensor on `device`, without waiting for it: a copy from pinned
    memory waits for the work before it."""
    found = values if isinstance(values, Tensor) else torch.tensor(values)
    if found.device == device:
        return found
    if device.type == "cuda" and found.device.type == "cpu":
        found = found.pin_memory()
    return found.to(device, non_blocking=device.type != "cpu")
