"""The Accelerator of a run, and what a launch may not say: settings of accelerate's config
file or of `accelerate launch` by which it would act behind the run's back (divide
gradients, cast, wrap or compile the head). Where a run does the same by a key of its own,
two places would say it; so what is not neutral is refused in one line, with the key to use.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    patch_environment,
)
from accelerate.utils.environment import get_cpu_distributed_information

from outrider.conf.errors import UserError
from outrider.train.signals import Stop, launch_words

OFF = ("", "no", "none", "false", "0", "auto")
PATIENCE = timedelta(minutes=10)  # of a collective
_SHARD = "set shard_target=true and launch with conf/launch/fsdp2.yaml"
# what is refused unless it is OFF: name in a config file -> what to do instead
REFUSED = {
    "gradient_accumulation_steps": "a step reads batch_size rows, micro_batch at a time",
    "gradient_clipping": "set optim.clip",
    "dynamo_backend": "the head is not compiled",
    "mixed_precision": "the run casts by itself; set dtype",
    "use_fsdp": f"the plugin would wrap the head and leave the target as it is; {_SHARD}",
    "use_deepspeed": f"FSDP2 shards a target that no GPU holds; {_SHARD}",
}


def start(batch_size: int, dtype: str, device: str, shard_group: int = 0) -> Accelerator:
    """Return the Accelerator of a run. Raises UserError for a setting that it would not
    honour, ranks that do not fit, and a device that is not there. All as the keys of these
    names."""
    if found := refusals(launched(), dtype):
        raise UserError(f"accelerate's settings: {'; '.join(found)}")
    # Before the ranks meet: one that is still connecting would see those leave that know.
    check_ranks(batch_size, shard_group, get_cpu_distributed_information().world_size)
    one = device_of(device)
    # Gradients lie in DDP's own buckets: a copy less.
    handlers = [
        InitProcessGroupKwargs(timeout=PATIENCE),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
    ]
    named = {"ACCELERATE_TORCH_DEVICE": one} if one else {}
    if one:
        torch.cuda.set_device(one)
    with patch_environment(**named):
        return Accelerator(
            cpu=on_processors(device),
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dynamo_backend="no",
            kwargs_handlers=handlers,
        )


def check_ranks(batch_size: int, shard_group: int, world: int) -> None:
    """Raise UserError when `world` ranks cannot share a batch, or copies of the target, evenly."""
    if over := batch_size % world:
        near = [n for n in (batch_size - over, batch_size - over + world) if n]
        raise UserError(
            f"batch_size: {batch_size} is no multiple of the {world} ranks; give "
            + " or ".join(map(str, near))
        )
    if shard_group and world % shard_group:
        raise UserError(
            f"shard_group: {shard_group} does not divide the {world} ranks; give the ranks of a "
            "node"
        )


def on_processors(device: str) -> bool:
    """Return whether Accelerate is configured to leave GPUs alone: by device=cpu, and for
    several processes where torch sees none, since each would be alone. device: as the key of
    that name."""
    several = get_cpu_distributed_information().world_size > 1
    return device == "cpu" or (several and not torch.accelerator.is_available())


@contextlib.contextmanager
def ending(accelerator: Accelerator, stop: Stop) -> Iterator[None]:
    """Leave the process group behind the block, and end its threads with it. The wrapped
    model holds the group and goes first: where it outlives the group, its end hangs, and
    where a thread of the group lets go of a tensor while the interpreter ends, that aborts
    the process."""
    try:
        yield
    except BaseException as error:
        if accelerator.num_processes > 1:
            traceback.clear_frames(error.__traceback__)
        raise
    finally:
        stop.over = True
        accelerator.free_memory()
        gc.collect()
        accelerator.end_training()


def launched() -> dict[str, Any]:
    """Return what the launcher was told, by the names of a config file: by environment
    variables, and in its own words, of which it hands some on for DeepSpeed alone."""
    found = {name: os.environ.get(f"ACCELERATE_{name.upper()}") for name in REFUSED}
    words = launch_words(os.getppid()) or []
    for word, following in pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if (name := option.removeprefix("--").replace("-", "_")) in REFUSED and option != name:
            found[name] = found[name] or value or following
    return found


def refusals(settings: Mapping[str, Any], dtype: str) -> list[str]:
    """Return what a run in `dtype` refuses of accelerate's settings: "name: value: what to
    do instead" each. settings: as `launched` or the command line of `accelerate launch`
    (launch.asked)."""
    same = [("gradient_accumulation_steps", "1")]  # as the run does it
    same += [("mixed_precision", "bf16")] if dtype == "bfloat16" else []
    found = []
    for name, instead in REFUSED.items():
        value = str(settings.get(name)).lower()
        if value not in OFF and (name, value) not in same:
            found.append(f"{name}: {value}: {instead}; leave it out")
    return found


def device_of(device: str) -> str:
    """Return the one GPU that the key `device` names, such as "cuda:3"; "" where it names
    none. Raises UserError for a GPU that is not there, and for one GPU of several
    processes."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return ""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = ""
    if not count:
        problem = "torch sees no GPU (`outrider doctor` says why); set device=cpu"
    elif number and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problem = (
            "there are several processes, which take one GPU each; leave the number out and "
            "choose GPUs with --gpu_ids or CUDA_VISIBLE_DEVICES"
        )
    elif number and int(number) >= count:
        problem = f"there are {count} GPUs, counted from 0"
    if problem:
        raise UserError(f"device: {device}, but {problem}")
    return device if number else ""


# Waiting for the other ranks without a collective, which would have a fixed time-out: to
# tokenize may take hours
# -------------------------------------------------------------------------------------------

PAUSE = 0.5  # seconds between two looks
_meetings: Counter[tuple[int, str]] = Counter()


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """Let rank 0 run the block, then the first rank of every other machine, then the rest,
    which find on disk what was done."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    stage = bool(rank) + bool(rank and int(os.environ.get("LOCAL_RANK", "0")))
    for turn in range(stage):
        barrier(f"{name} {turn}")
    wait = False
    try:
        yield
        wait = True
    finally:  # after a mistake the others go on to it themselves
        for turn in range(stage, 2):
            barrier(f"{name} {turn}", wait)


def wait_for(path: Path) -> None:
    """Wait until a file is there, and say so once."""
    if not path.is_file() and os.environ.get("RANK", "0") == "0":
        print(f"waiting for {path}", file=sys.stderr, flush=True)
    while not path.is_file():
        time.sleep(PAUSE)


def barrier(name: str, wait: bool = True) -> None:
    """Wait until every rank has come here, by looking at the store that they met at. wait:
    False says that this rank was here, and goes on."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    place = (id(dist.group.WORLD), name)
    _meetings[place] += 1  # a new key at each meeting
    key = f"outrider/{name}/{_meetings[place]}"
    store.add(key, 1)
    while wait and int(store.add(key, 0)) < dist.get_world_size():
        time.sleep(PAUSE)
