"""What stands on this machine, part by part: facts, and problems that would stop a run or
spoil it. Nothing is loaded, changed or downloaded.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from packaging.requirements import Requirement

from outrider.conf.errors import UserError, first_line
from outrider.decode.models.arithmetic import bfloat16_on_cpu
from outrider.decode.models.identity import cache_root
from outrider.decode.models.memory import available
from outrider.heads.layers import attention as ttt
from outrider.scripts.common import files
from outrider.train.accelerator import launched, refusals
from outrider.train.config import TRACKERS
from outrider.train.launch import asked, devices, here

GIB = 1 << 30
LEAST_DISK = 5 * GIB  # below that the first cache or checkpoint may not fit
LEAST_MEMORY = 2 * GIB
WORTH_TELLING = ("torch", "transformers", "accelerate", "datasets", "safetensors", "hydra-core")
FURTHER = ("bitsandbytes", "torchao", "flash-attn", "vllm", *TRACKERS)


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
    yield build(device, dtype)
    yield attention(device, dtype)
    yield memory_and_disk(out_dir)
    yield accelerate_config(dtype)
    yield caches()


def versions() -> ReportPart:
    """Packages, and whether they are new enough."""
    part = ReportPart("versions", [f"python {platform.python_version()}, {platform.platform()}"])
    known = {name: files.installed(name) for name in (*WORTH_TELLING, *FURTHER)}
    part.facts.append("  ".join(f"{name} {found}" for name, found in known.items() if found))
    try:
        wanted = [Requirement(line) for line in requires("outrider") or ()]
    except PackageNotFoundError:
        part.facts.append("outrider is not installed: versions not compared")
        return part
    for need in wanted:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = files.installed(need.name)
        if not found:
            part.problems.append(f"{need.name}: not installed; pip install '{need}'")
        elif not need.specifier.contains(found, prereleases=True):
            part.problems.append(f"{need.name}: {found} is here, {need} is needed; upgrade it")
    return part


def build(device: str, dtype: str) -> ReportPart:
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
        _gpu(part, number, dtype)
    if not count:
        part.facts.append("no GPU is seen")
        if Path("/dev/nvidia0").exists():
            part.problems.append(
                "torch: there is a GPU that it does not see; install a build with CUDA, or "
                "mend the driver or CUDA_VISIBLE_DEVICES"
            )
    if not there(device) and not part.problems:
        part.problems.append(
            f"device: {device} asked for, and there are {count} GPUs; set device=cpu"
        )
    if count > 1 and not torch.distributed.is_nccl_available():
        part.problems.append("torch: several GPUs, but no NCCL; install another build")
    return part


def _gpu(part: ReportPart, number: int, dtype: str) -> None:
    about: Any = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    part.facts.append(
        f"GPU {number}: {about.name}, {about.major}.{about.minor}, {free / GIB:.1f} of "
        f"{total / GIB:.1f} GiB free"
    )
    arch = f"sm_{about.major}{about.minor}"
    built = torch.cuda.get_arch_list()
    newer = any(a.startswith("compute_") for a in built)
    same = [a for a in built if a.startswith(f"sm_{about.major}")]
    if torch.version.cuda and built and not same and not newer:
        part.problems.append(
            f"torch: built for {', '.join(built)}, GPU {number} is {arch}; take a newer one"
        )
    if dtype == "bfloat16" and torch.version.cuda and about.major < 8:
        part.problems.append(
            f"dtype: GPU {number} ({arch}) has no bfloat16 of its own; set dtype=float32"
        )


def attention(device: str, dtype: str) -> ReportPart:
    """Attention kernels that this build has, and which the training of EAGLE heads takes."""
    part = ReportPart("attention")
    if device.startswith("cuda"):
        cuda = torch.backends.cuda
        there = {
            "flash": cuda.is_flash_attention_available(),
            "efficient": cuda.mem_efficient_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
        }
        names = [f"{name} {'yes' if on else 'no'}" for name, on in there.items()]
        part.facts.append(f"scaled_dot_product_attention: {', '.join(names)}")
    elif not bfloat16_on_cpu():
        part.facts.append("no instructions for bfloat16: dtype=auto is float32 here")
    query = torch.empty(1, 2, 128, device=device, dtype=getattr(torch, dtype))
    taken = ttt.kernel_for(query)
    known = {id(ttt.CPU): "the CPU's flash kernel", id(ttt.FLASH): "flash attention"}
    part.facts.append(
        f"training-time test: {known.get(id(taken), 'dense blocks, document by document')} in "
        f"{dtype}"
    )
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
        there = _existing(place.expanduser().resolve())
        room = shutil.disk_usage(there).free
        part.facts.append(f"{name}: {place}, {room / GIB:.1f} GiB free")
        if room < LEAST_DISK:
            part.problems.append(
                f"{name}: {room / GIB:.1f} GiB free at {place}; free some, or change the folder"
            )
        if not os.access(there, os.W_OK):
            part.problems.append(f"{name}: {there} cannot be written; choose another folder")
    return part


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next(p for p in (path, *path.parents) if p.exists())


def accelerate_config(dtype: str) -> ReportPart:
    """What the user's accelerate config says, and what a run makes of it."""
    part = ReportPart("accelerate's config")
    for line in refusals(launched(), dtype):
        part.problems.append(f"environment: {line}")
    path = _config_file()
    if path is None:
        part.facts.append("none: `accelerate launch` takes one process for each GPU")
        return part
    part.facts.append(f"{path}, which `accelerate launch` reads without --config_file")
    try:
        config = yaml.safe_load(path.read_text())
        if config.get("use_cpu") and gpus():
            part.problems.append(f"{path}: use_cpu: there are GPUs here; set it to false")
        launch = asked(["--config_file", str(path), "train/head.py"])
        part.problems += [f"{path}: {line}" for line in refusals(vars(launch), dtype)]
        if part.problems:
            return part
        count = here(launch)
        taken = devices(count)
    except UserError as error:
        part.problems.append(f"{path}: {error}")
        return part
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        part.problems.append(
            f"{path}: cannot be taken ({first_line(error)}); run `accelerate config` again"
        )
        return part
    place = f"{taken} GPU(s)" if taken else "the processors"
    part.facts.append(f"a launch trains with {count} process(es) of this machine, on {place}")
    return part


def _config_file() -> Path | None:
    """The file that `accelerate launch` reads by itself; None where there is none."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(default_config_file)
    return path if path.is_file() else None


def caches() -> ReportPart:
    """Where caches lie, and whether processes can take turns there."""
    part, root = ReportPart("caches"), cache_root()
    named = "$OUTRIDER_CACHE" if os.environ.get("OUTRIDER_CACHE") else "set OUTRIDER_CACHE to move"
    part.facts.append(f"tokens, targets, hashes: {root} ({named})")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".doctor-") as folder:
            with FileLock(Path(folder) / "try.lock", timeout=5):
                pass
    except (OSError, Timeout, RuntimeError) as error:
        part.problems.append(
            f"cache: no file can be written and locked in {root} ({first_line(error)}); set "
            "OUTRIDER_CACHE to a folder on another file system"
        )
    return part


def report(parts: Iterator[ReportPart]) -> list[ReportPart]:
    """Say each part as soon as it is known."""
    found = []
    for part in parts:
        print(f"[{'PROBLEM' if part.problems else 'ok'}] {part.name}")
        for line in part.facts:
            print(f"     {line}")
        for line in part.problems:
            print(f"     PROBLEM: {line}")
        found.append(part)
    return found


def gpus() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def there(device: str) -> bool:
    """Whether torch sees this device: "cpu", "cuda" or "cuda:N"."""
    kind, _, number = device.partition(":")
    return kind != "cuda" or int(number or 0) < gpus()


def usable(device: str) -> str:
    """`device`, or what is there if it is empty. Raises UserError for a GPU that is not."""
    if not device:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not there(device):
        raise UserError(f"device: {device} asked for, and torch does not see it; set device=cpu")
    return device
