"""Memory of this process: on a GPU the allocator's, on a CPU what is resident, which the kernel
records.
"""

from __future__ import annotations

import contextlib
import resource

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the most memory since the last reset, bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):  # without a reset: of the whole process
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_gpu(device: torch.device) -> dict[str, int]:
    """Return the GPU's memory for a line of metrics: held now and the most so far, bytes;
    {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "gpu_memory_bytes": torch.cuda.memory_allocated(device),
        "gpu_peak_memory_bytes": torch.cuda.max_memory_allocated(device),
    }


def reset_peak(device: torch.device) -> None:
    """Let the peak begin again at what is held. Without permission, or outside Linux, nothing
    happens."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def is_no_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, in whichever words a library says so."""
    said = (
        *("not enough memory", "can't allocate memory", "out of memory"),
        *("ALLOC_FAILED", "Cannot allocate memory"),
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )
