"""What stands on this machine, part by part: facts, and problems that would stop a run or
spoil it. Nothing is loaded, changed or downloaded.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class ReportPart:
    """One part of the report. facts: lines. problems: "key or thing: what; fix" each."""

    name: str
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def all_parts(device: str, dtype: str, out_dir: Path) -> Iterator[ReportPart]:
    """Everything, in the order of the report. device: "cuda", "cuda:N" or "cpu". out_dir:
    where runs would lie."""
    yield versions()
    yield build(dtype)
    yield attention(device, dtype)
    yield memory_and_disk(out_dir)


def versions() -> ReportPart:
    """Packages, and whether they are new enough."""
    part = ReportPart("versions", [f"python {platform.python_version()}, {platform.platform()}"])
    known = {name: files.installed(name) for name in WORTH_TELLING}
    part.facts.append("  ".join(f"{name} {found}" for name, found in known.items() if found))
    for need in map(Requirement, requires("outrider") or ()):
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = files.installed(need.name)
        if not need.specifier.contains(found or "0", prereleases=True):
            problem = f"{need.name}: {found or 'not installed'}, {need} is needed"
            part.problems.append(f"{problem}; pip install '{need}'")
    return part


def build(dtype: str) -> ReportPart:
    """torch's build and the GPUs it sees."""
    part = ReportPart("torch and GPUs")
    made_for = torch.version.cuda or torch.version.hip
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {made_for}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    part.facts.append(
        f"torch {torch.__version__}, {kind if made_for else 'for the CPU alone'}, "
        f"{torch.get_num_threads()} threads on {cores} cores"
    )
    count = gpus()
    for number in range(count):
        about: Any = torch.cuda.get_device_properties(number)
        free, total = (f"{size / GIB:.1f}" for size in torch.cuda.mem_get_info(number))
        name = f"GPU {number}: {about.name}, {about.major}.{about.minor}"
        part.facts.append(f"{name}, {free} of {total} GiB free")
        if dtype == "bfloat16" and torch.version.cuda and about.major < 8:
            part.problems.append(f"dtype: {name} has no bfloat16 of its own; set dtype=float32")
    if not count:
        part.facts.append("no GPU is seen")
    if not count and Path("/dev/nvidia0").exists():
        part.problems.append(
            "torch: there is a GPU that it does not see; install a build with CUDA, or mend the "
            "driver or CUDA_VISIBLE_DEVICES"
        )
    if count > 1 and not torch.distributed.is_nccl_available():
        part.problems.append("torch: several GPUs, but no NCCL; install another build")
    return part


def attention(device: str, dtype: str) -> ReportPart:
    """Return which attention kernel the training of EAGLE heads takes."""
    part = ReportPart("attention")
    if not device.startswith("cuda") and not bfloat16_on_cpu():
        part.facts.append("no instructions for bfloat16: dtype=auto is float32 here")
    taken = ttt.kernel_for(torch.empty(1, 2, 128, device=device, dtype=getattr(torch, dtype)))
    known = {id(ttt.CPU): "the CPU's flash kernel", id(ttt.FLASH): "flash attention"}
    name = known.get(id(taken), "dense blocks, document by document")
    part.facts.append(f"training-time test: {name} in {dtype}")
    if device.startswith("cuda") and taken is not ttt.FLASH:
        part.facts.append("flash attention needs float16 or bfloat16 on a GPU from 8.0 on")
    return part


def memory_and_disk(out_dir: Path) -> ReportPart:
    """Host memory, and disk where runs, caches and models go."""
    part = ReportPart("memory and disk")
    free = available("cpu") or 0
    part.facts.append(f"host memory: {free / GIB:.1f} GiB free")
    if free < LEAST_MEMORY:
        part.problems.append("host memory: less than 2 GiB free; end something else first")
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for name, place in (("runs", out_dir), ("cache", cache_root()), ("models", hub)):
        place = place.expanduser().resolve()
        near = next(p for p in (place, *place.parents) if p.exists())
        room = shutil.disk_usage(near).free
        part.facts.append(f"{name}: {place}, {room / GIB:.1f} GiB free")
        if room < LEAST_DISK:
            part.problems.append(
                f"{name}: {room / GIB:.1f} GiB free at {place}; free some, or change the folder"
            )
        if not near.is_dir() or not os.access(near, os.W_OK):
            part.problems.append(f"{name}: {near} cannot be written; choose another folder")
    return part


def report(parts: Iterator[ReportPart]) -> list[str]:
    """Say each part as soon as it is known; the problems of all."""
    problems = []
    for part in parts:
        print(f"[{'PROBLEM' if part.problems else 'ok'}] {part.name}")
        for line in [*part.facts, *(f"PROBLEM: {problem}" for problem in part.problems)]:
            print(f"     {line}")
        problems += part.problems
    return problems


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
