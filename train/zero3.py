"""DeepSpeed's ZeRO-3 in place of FSDP2 for a target that no device can hold:
conf/launch/zero3.yaml asks for it.

The same layers are sharded as by train/sharding.py, and the same parts stay whole. DeepSpeed
is given these layers and neither head nor optimizer: the head learns as in every other run,
its gradient is exchanged by DDP, and nothing of the target enters either. What FSDP2 does not
do here: `offload_param_device: cpu` (or nvme) keeps shards off the GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outrider.conf.errors import UserError
from outrider.decode.target import Target

REQUESTED = "ACCELERATE_USE_DEEPSPEED"
SWITCH = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def requested() -> bool:
    """Whether Accelerate's launcher was told to use DeepSpeed."""
    return os.environ.get(REQUESTED, "").lower() == "true"


@contextlib.contextmanager
def plain_launch(cfg: Any) -> Iterator[None]:
    """While open, Accelerate does not see that DeepSpeed is wanted: its engine would take the
    head and its optimizer.

    cfg: the run. Raises UserError for a launch with DeepSpeed whose target is not to be
        sharded, or cannot be.
    """
    if not requested():
        yield
        return
    if not cfg.shard_target:
        raise UserError(
            "shard_target: the launch asks for DeepSpeed, which serves the target alone; set "
            "shard_target=true, or launch with conf/launch/ddp.yaml"
        )
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    if stage != "3":
        raise UserError(
            f"shard_target: ZeRO stage {stage} shards what is trained, not a frozen target; launch "
            "with conf/launch/zero3.yaml or conf/launch/fsdp2.yaml"
        )
    if cfg.dtype == "float64":
        raise UserError(
            "dtype: DeepSpeed knows no float64; use float32 or less, or launch with "
            "conf/launch/fsdp2.yaml"
        )
    before = os.environ.pop(REQUESTED)
    try:
        yield
    finally:
        os.environ[REQUESTED] = before


def shard_layers(target: Target, stacks: list[nn.ModuleList], device: torch.device) -> str:
    """Shard `stacks`, the layers of the target, over all ranks, in place; a word about it.
    Their weights may still lie on the CPU: one after the other moves to its shard. Raises
    UserError when DeepSpeed is missing."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError:
        raise UserError(
            "shard_target: DeepSpeed is not installed; pip install deepspeed, or launch with "
            "conf/launch/fsdp2.yaml"
        ) from None
    from accelerate.utils import DeepSpeedPlugin

    # Gloo will do: DeepSpeed would compile a collective of its own first, for minutes.
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    given = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    zero = {k: v for k, v in given.items() if v != "auto" and not k.startswith("offload")}
    place = (given.get("offload_param") or {}).get("device", "none")
    if place != "none":
        zero["offload_param"] = {k: v for k, v in given["offload_param"].items() if v is not None}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {**zero, "stage": 3},
    }
    if target.dtype in SWITCH:
        config[SWITCH[target.dtype]] = {"enabled": True}
    layers = nn.ModuleList(stacks)
    deepspeed.zero.Init(module=layers, config_dict_or_path=config, dtype=target.dtype)
    engine = deepspeed.initialize(model=layers, config=config)[0]
    coordinator = engine.optimizer.get_param_coordinator()
    # DeepSpeed counts its steps by the forward of what it was given, which nobody calls.
    target.body.register_forward_pre_hook(lambda *_: coordinator.reset_step())
    return f"by ZeRO-3 over {dist.get_world_size()} ranks" + (
        f", kept on {place}" if place != "none" else ""
    )
