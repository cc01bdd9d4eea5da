"""Memory of a run: what is held and the peak, and the peak predicted from two small passes, of
what is held and what grows with the rows.

On a GPU it is the allocator's; on a CPU the resident memory of this process, which the kernel
records.
"""

from __future__ import annotations

import contextlib
import gc
import resource
from typing import Any, NamedTuple

import psutil
import torch

from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.packing import Limits


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


def held_bytes(device: torch.device) -> int:
    """Return what is held now, bytes."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


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


class Peak(NamedTuple):
    """Bytes of a run. held: target and head, on a CPU also the snapshot of a checkpoint.
    moments: of the optimizer. step: of the widest micro-batch, with the gradients. saving:
    what writing a checkpoint adds. loading: the most before the first step."""

    held: int
    moments: int
    step: int
    saving: int
    loading: int

    @property
    def bytes(self) -> int:
        return max(self.loading, self.held + self.moments + max(self.step, self.saving))


def widest(cfg: Any, rows: JoinedRows, plan: BatchPlan) -> list[int]:
    """Return the micro-batch with the most padded tokens among the steps of the run, at
    most one epoch of them."""
    limits = Limits(cfg.micro_batch, cfg.micro_tokens)
    parts = (
        part
        for step in range(min(cfg.steps, plan.per_epoch))
        for part in plan.shares(step, 1, limits)[0]
    )
    return max(parts, key=lambda part: (rows.computed(part), part))


def predict(cfg: Any, target: Target, head: Head, rows: JoinedRows, plan: BatchPlan) -> Peak:
    """Return the peak of a run in one process, without evaluation. Two passes, over a
    quarter and half as many rows as the widest micro-batch has, give what grows with the
    rows; a first one fills the caches of the libraries."""
    device, loading, part = target.device, peak_bytes(target.device), widest(cfg, rows, plan)
    longest = max(part, key=lambda row: int(rows.lengths[row]))
    small, large = max(1, len(part) // 4), max(2, len(part) // 2)
    found = {}
    for count in (small, small, large):
        head.zero_grad()
        before = held_bytes(device)
        gc.collect()
        reset_peak(device)
        # of one length, the widest: cost is linear in their number
        head(rows.batch([longest] * count).to(device), target).sum.backward()
        found[count] = (peak_bytes(device) - before, before)
    head.zero_grad()
    slope = max(0, found[large][0] - found[small][0]) / max(1, large - small)
    step = found[small][0] + slope * (len(part) - small)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    if 0 < cfg.micro_batch < cfg.batch_size or cfg.micro_tokens:
        step += 4 * trained  # the gradients so far, beside those of this micro-batch
    held, saving = found[small][1], 0
    if device.type != "cuda":  # train/checkpoint.py
        held += 12 * trained if cfg.async_save and 0 < cfg.save_every < cfg.steps else 0
        saving = 8 * trained  # safetensors copies the moments; no gradient is held then
    return Peak(held, 8 * trained, round(step), saving, loading)
