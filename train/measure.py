"""What a step costs: floating point operations, counted once, beside the device's peak;
memory of this process, on a GPU the allocator's, on a CPU what is resident, which the
kernel records; and a trace of some steps by torch.profiler.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Dense bfloat16 matrix products with float32 sums, TFLOP/s, without sparsity, as the makers'
# data sheets give them. The first name that is a part of the device's counts, so a variant
# comes before its family.
PEAKS = (
    *(("GB200", 2500.0), ("B200", 2250.0), ("GH200", 989.4), ("H200", 989.4)),
    *(("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.4), ("H800", 989.4)),
    *(("A100", 311.9), ("L40S", 362.1), ("RTX 4090", 165.2), ("MI300X", 1307.4)),
)


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the most FLOP/s of a device for products in `dtype`, None where it is not known.
    name: as torch.cuda.get_device_name gives it."""
    if dtype != "bfloat16":
        return None
    # whole words: "A100-SXM4-80GB" is an A100, "A1000" is none
    found = (peak for known, peak in PEAKS if re.search(rf"\b{known}\b", name))
    return next((1e12 * peak for peak in found), None)


class Counter(TorchDispatchMode):
    """Counts by torch's formulas and changes no bit: torch's FlopCounterMode takes some
    operations apart, such as the gradient of SiLU, which then round differently. total: nan
    where a formula, which differs by torch's version, raised."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            try:
                self.total += int(formula(*args, **kwargs, out_val=out))
            except Exception:
                self.total = math.nan
        return out


class Flops:
    """Floating point operations of a token, target and head, forward and backward: counted
    in the first training pass of this process as it runs. What activation checkpointing
    computes again counts, what an optimizer does does not. Where this torch cannot count
    them, no rate is made of them."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.total = math.nan
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_flops(name, dtype)
        self._tokens: Tensor | None = None

    @contextlib.contextmanager
    def counted(self, mask: Tensor) -> Iterator[None]:
        """Count what runs inside, unless a pass was counted already. mask: bool, its real
        tokens."""
        if self._tokens is not None:
            yield
            return
        with Counter() as counter:
            yield
        self.total, self._tokens = counter.total, mask.sum()

    def rates(self, tokens_per_second: float, world: int) -> dict[str, float]:
        """Return, for a line of metrics, tokens and TFLOP per second of each of `world`
        devices, and the share of their peak where that is known (MFU)."""
        each = tokens_per_second / world
        found = {"tokens_per_second_per_device": round(each, 1)}
        if self._tokens is None or math.isnan(self.total):
            return found
        flops = self.total / max(float(self._tokens), 1.0) * each
        found["tflops_per_device"] = float(f"{flops / 1e12:.4g}")
        if self.peak is not None:
            found["mfu"] = round(flops / self.peak, 4)
        return found


# Memory
# -------------------------------------------------------------------------------------------


def peak_bytes(device: torch.device) -> int:
    """Return the most memory so far, bytes; on a GPU since its statistics were reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_no_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, in whichever words a library
    says so."""
    said = (
        *("not enough memory", "can't allocate memory", "out of memory"),
        *("ALLOC_FAILED", "Cannot allocate memory"),
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )


# The profiler: profile=[from,to]
# -------------------------------------------------------------------------------------------


def profiler(window: list[int], done: int, out: Path) -> torch.profiler.profile | None:
    """Start to record the steps of `window`, counted from 1 as in metrics.jsonl, into one
    trace in OUT/profile; its step() follows each of them. Of a window that has begun already
    the rest is recorded; None where nothing is left of it. done: steps so far."""
    first, last = window or (0, 0)
    if done >= last:
        return None
    before = max(0, first - 1 - done)
    spans = {"wait": max(0, before - 1), "warmup": min(1, before), "active": last - done - before}
    plan = torch.profiler.schedule(**spans, repeat=1)
    handler = torch.profiler.tensorboard_trace_handler(str(out / "profile"), None, True)
    found = torch.profiler.profile(schedule=plan, on_trace_ready=handler)
    found.start()
    return found
