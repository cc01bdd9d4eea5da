"""Accelerate's own settings: what of a user's config file (`accelerate config`, --config_file,
options of `accelerate launch`) a run honours, and what it refuses in one line.

The launcher hands its settings on as environment variables, and Accelerate would act on them
behind the run's back: divide gradients, put the head under autocast, wrap or compile it. Where a
run does the same by a key of its own, two places would say it; so what is not neutral is
refused, with the key to use. Everything else of a config file says how many processes there are,
where, and how they meet (num_processes, num_machines, machine_rank, main_process_ip and _port,
gpu_ids, rdzv_backend, same_network, use_cpu, enable_cpu_affinity, debug): honoured.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from accelerate.utils.environment import get_cpu_distributed_information

from outrider.conf.errors import UserError
from outrider.train import rendezvous
from outrider.train.config import TrainConfig
from outrider.train.facts import check_ranks
from outrider.train.signals import Stop

OFF = ("", "no", "none", "false", "0", "auto")
PATIENCE = timedelta(minutes=10)  # of a collective
# name in a config file -> (environment variable, values without effect, what to do instead)
REFUSED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "gradient_accumulation_steps": (
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        (*OFF, "1"),
        "a step reads batch_size rows, micro_batch at a time; leave it out",
    ),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", OFF, "set optim.clip; leave it out"),
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", OFF, "the head is not compiled; leave it out"),
    "fsdp_config": (
        "ACCELERATE_USE_FSDP",
        OFF,
        "the plugin would wrap the head and leave the target as it is; set shard_target=true and "
        "launch with conf/launch/fsdp2.yaml",
    ),
    "megatron_lm_config": (
        "ACCELERATE_USE_MEGATRON_LM",
        OFF,
        "launch with conf/launch/ddp.yaml or conf/launch/fsdp2.yaml",
    ),
    "parallelism_config": (
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        OFF,
        "ranks share rows alone; launch with conf/launch/ddp.yaml or conf/launch/fsdp2.yaml",
    ),
    "deepspeed_config": (
        "ACCELERATE_USE_DEEPSPEED",
        OFF,
        "FSDP2 shards a target that no GPU holds; set shard_target=true and launch with "
        "conf/launch/fsdp2.yaml",
    ),
    "distributed_type: SAGEMAKER": (
        "ACCELERATE_USE_SAGEMAKER",
        OFF,
        "launch with conf/launch/ddp.yaml",
    ),
}
HONOURED = (  # of a config file
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "rdzv_backend",
    "same_network",
    "use_cpu",
    "enable_cpu_affinity",
    "debug",
)
PRECISION = "ACCELERATE_MIXED_PRECISION"
AGREE = {"bf16": "bfloat16"}  # mixed_precision -> the dtype under which it says the same


def start(cfg: TrainConfig) -> Accelerator:
    """The Accelerator of a run. Raises UserError for a setting that it would not honour, ranks
    that do not fit, and a device that is not there."""
    check_settings(cfg)
    # Before the ranks meet: one that is still connecting would see those leave that know.
    check_ranks(cfg, get_cpu_distributed_information().world_size)
    device = device_of(cfg)
    # Gradients lie in DDP's own buckets: a copy less.
    handlers = [
        InitProcessGroupKwargs(timeout=PATIENCE, init_method=rendezvous.init_method()),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
    ]
    before = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if device:
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
        torch.cuda.set_device(device)
    try:
        return Accelerator(
            cpu=on_processors(cfg.device),
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dynamo_backend="no",
            kwargs_handlers=handlers,
        )
    finally:
        if device and before is None:
            del os.environ["ACCELERATE_TORCH_DEVICE"]


def on_processors(device: str) -> bool:
    """Whether Accelerate is told to leave GPUs alone: by device=cpu, and for several processes
    where torch sees none, since each would be alone. device: as the key of that name."""
    several = get_cpu_distributed_information().world_size > 1
    return device == "cpu" or (several and not torch.accelerator.is_available())


@contextlib.contextmanager
def ending(accelerator: Accelerator, stop: Stop) -> Iterator[None]:
    """Leave the process group behind the block, and end its threads with it. The wrapped model
    holds the group and goes first: where it outlives the group, its end hangs, and where a thread
    of the group lets go of a tensor while the interpreter ends, that aborts the process."""
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


def check_settings(cfg: TrainConfig) -> None:
    """Raises UserError naming every setting of the launch that the run would not honour."""
    if found := refusals(os.environ, cfg.dtype):
        raise UserError(f"accelerate's settings: {'; '.join(found)}")


def refusals(environment: Mapping[str, str], dtype: str) -> list[str]:
    """What a run in `dtype` refuses of the launcher's environment variables: "name: value: what
    to do instead" each."""
    found = []
    for name, (variable, neutral, instead) in REFUSED.items():
        value = environment.get(variable, "")
        if value.lower() not in neutral:
            shown = "" if value.lower() == "true" else f": {value}"
            found.append(f"{name}{shown}: {instead}")
    precision = environment.get(PRECISION, "no").lower()
    if precision not in OFF and AGREE.get(precision) != dtype:
        found.append(
            f"mixed_precision: {precision}: the run casts by itself, here to dtype={dtype}; "
            "set mixed_precision: 'no'"
            + (f", or dtype={AGREE[precision]}" if precision in AGREE else "")
        )
    return found


def of_file(config: Mapping[str, Any]) -> dict[str, str]:
    """The variables that `accelerate launch` would set from a config file, as far as `refusals`
    reads them. config: the file's content."""
    kind = str(config.get("distributed_type", "")).upper()
    dynamo = _mapping(config, "dynamo_config")
    place = str(config.get("compute_environment", "")).upper()
    values = {
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "gradient_clipping": config.get("gradient_clipping"),
        "dynamo_backend": dynamo.get("dynamo_backend", config.get("dynamo_backend")),
        "fsdp_config": kind == "FSDP",
        "megatron_lm_config": kind == "MEGATRON_LM",
        "parallelism_config": bool(config.get("parallelism_config")),
        "deepspeed_config": kind == "DEEPSPEED",
        "distributed_type: SAGEMAKER": "SAGEMAKER" in place,
    }
    found = {REFUSED[name][0]: str(value) for name, value in values.items() if value is not None}
    found[PRECISION] = str(config.get("mixed_precision", "no"))
    return found


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def device_of(cfg: TrainConfig) -> str:
    """The one GPU that cfg.device names, such as "cuda:3"; "" where it names none. Raises
    UserError for a GPU that is not there, and for one GPU of several processes."""
    kind, _, number = cfg.device.partition(":")
    if kind != "cuda":
        return ""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
        raise UserError(
            f"device: {cfg.device}, but accelerate was told to use the CPU (use_cpu); leave one out"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "none is seen"
        raise UserError(
            f"device: {cfg.device} asked for, but {build}; set device=cpu, or mend driver, "
            "CUDA_VISIBLE_DEVICES or torch"
        )
    if not number:
        return ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"device: {cfg.device} is one GPU, but there are several processes, which take one "
            "each; leave the number out and choose GPUs with --gpu_ids or CUDA_VISIBLE_DEVICES"
        )
    if int(number) >= count:
        raise UserError(f"device: {cfg.device}, but there are {count} GPUs, counted from 0")
    return cfg.device
