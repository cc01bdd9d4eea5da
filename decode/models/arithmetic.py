"""Which numbers a machine computes with: what `dtype=auto` is."""

from __future__ import annotations

import os

import torch


def bfloat16_on_cpu() -> bool:
    """Return whether this processor has instructions for bfloat16 and this build of torch
    uses them. Without them a bfloat16 product takes torch two to eight times as long as a
    float32 one."""
    library = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(library, "_is_mkldnn_bf16_supported")
        and bool(library._is_mkldnn_bf16_supported())
    )


def dtype_on(device: str | None) -> str:
    """Return what `dtype=auto` is on a device: bfloat16, but float32 on a CPU without
    instructions for it. device: as the key of that name; nothing: the GPU when there is
    one, else the CPU."""
    if not device:
        cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    return "bfloat16" if not device.startswith("cpu") or bfloat16_on_cpu() else "float32"
