"""What this machine has, part by part: lines of facts, and of problems that would stop a run
or spoil it, "key or thing: what; fix" each. Nothing is loaded, changed or downloaded.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from outrider.conf.errors import UserError
from outrider.decode.models.arithmetic import bfloat16_on_cpu
from outrider.decode.models.identity import cache_root
from outrider.decode.models.memory import available
from outrider.heads.layers import attention as ttt
from outrider.scripts.common import files

GIB = 1 << 30
LEAST_DISK = 5 * GIB  # below that the first cache or checkpoint may not fit
LEAST_MEMORY = 2 * GIB
WORTH_TELLING = ("torch", "transformers", "accelerate", "datasets", "safetensors", "wandb", "vllm")
PROBLEM = "PROBLEM: "  # how a line of a problem begins


def look(device: str, dtype: str, out_dir: Path) -> list[str]:
    """Say everything, each part as soon as it is known; the problems of all. device: "cuda",
    "cuda:N" or "cpu". out_dir: where runs would lie."""
    problems = []
    for part in (versions(), build(dtype), attention(device, dtype), memory_and_disk(out_dir)):
        for line in part:
            print(line, flush=True)
            problems += [line] if line.startswith(PROBLEM) else []
    return problems


def versions() -> Iterator[str]:
    """Packages, and whether they are new enough."""
    yield f"python {platform.python_version()}, {platform.platform()}"
    known = {name: files.installed(name) for name in WORTH_TELLING}
    yield "  ".join(f"{name} {found}" for name, found in known.items() if found)
    for need in map(Requirement, requires("outrider") or ()):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = files.installed(need.name)
        if not need.specifier.contains(found or "0", prereleases=True):
            lacking = f"{need.name}: {found or 'not installed'}, {need} is needed"
            yield f"{PROBLEM}{lacking}; pip install '{need}'"


def build(dtype: str) -> Iterator[str]:
    """torch's build and the GPUs it sees."""
    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} threads on {cores} cores"
    yield f"torch {torch.__version__}, for {made_for or 'the CPU alone'}, {threads}"
    count = gpus()
    for number in range(count):
        about: Any = torch.cuda.get_device_properties(number)
        free, total = (f"{size / GIB:.1f}" for size in torch.cuda.mem_get_info(number))
        name = f"GPU {number}: {about.name}, {about.major}.{about.minor}"
        yield f"{name}, {free} of {total} GiB free"
        if dtype == "bfloat16" and torch.version.cuda and about.major < 8:
            yield f"{PROBLEM}dtype: {name} has no bfloat16 of its own; set dtype=float32"
    if not count and Path("/dev/nvidia0").exists():
        fix = "install a build with CUDA, or mend the driver or CUDA_VISIBLE_DEVICES"
        yield f"{PROBLEM}torch: there is a GPU that it does not see; {fix}"
    if count > 1 and not torch.distributed.is_nccl_available():
        yield f"{PROBLEM}torch: several GPUs, but no NCCL; install another build"


def attention(device: str, dtype: str) -> Iterator[str]:
    """Yield which attention kernel the training of EAGLE heads takes."""
    if not device.startswith("cuda") and not bfloat16_on_cpu():
        yield "no instructions for bfloat16: dtype=auto is float32 here"
    taken = ttt.kernel_for(torch.empty(1, 2, 128, device=device, dtype=getattr(torch, dtype)))
    known = {id(ttt.CPU): "the CPU's flash kernel", id(ttt.FLASH): "flash attention"}
    name = known.get(id(taken), "dense blocks, document by document")
    yield f"attention in training-time test: {name} in {dtype}"
    if device.startswith("cuda") and taken is not ttt.FLASH:
        yield "flash attention needs float16 or bfloat16 on a GPU from 8.0 on"


def memory_and_disk(out_dir: Path) -> Iterator[str]:
    """Host memory, and disk where runs, caches and models go."""
    free = available("cpu") or 0
    yield f"host memory: {free / GIB:.1f} GiB free"
    if free < LEAST_MEMORY:
        yield f"{PROBLEM}host memory: less than 2 GiB free; end something else first"
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for name, place in (("runs", out_dir), ("cache", cache_root()), ("models", hub)):
        place = place.expanduser().resolve()
        near = next(p for p in (place, *place.parents) if p.exists())
        room = shutil.disk_usage(near).free
        said = f"{name}: {room / GIB:.1f} GiB free at {place}"
        yield said if room >= LEAST_DISK else f"{PROBLEM}{said}; free some, or change the folder"
        if not near.is_dir() or not os.access(near, os.W_OK):
            yield f"{PROBLEM}{name}: {near} cannot be written; choose another folder"


def gpus() -> int:
    """Return how many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def usable(device: str) -> str:
    """`device`, or what is there if it is empty. Raises UserError for a GPU that is not."""
    if not device:
        return "cuda" if gpus() else "cpu"
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= gpus():
        raise UserError(f"device: {device} asked for, and torch does not see it; set device=cpu")
    return device
