"""A target that no single device can hold, spread over the ranks: FSDP2's fully_shard on each
of its layers, or DeepSpeed's ZeRO-3 where the launch asks for it (train/zero3.py).

Only the stacked layers are sharded. Embedding, final norm and LM head stay whole on every
rank, because a head's loss calls them outside the target's own forward. Nothing of the target
is trained, so the forward gathers one layer at a time and nothing is ever reduced; the head is
replicated, and its gradient is exchanged as always.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from conf.errors import UserError
from decode.target import Target
from heads.base import Head
from train import zero3


def layer_stacks(target: Target) -> list[tuple[str, nn.ModuleList]]:
    """The stacked layers of a target's body by name: outermost module lists that hold neither
    embedding nor LM head.
    """
    whole = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    kept = {id(p) for part in whole if part is not None for p in part.parameters()}
    found: list[tuple[str, nn.ModuleList]] = []
    for name, part in target.body.named_modules():
        inside = any(name.startswith(outer + ".") for outer, _ in found)
        if isinstance(part, nn.ModuleList) and not inside:
            mine = list(part.parameters())
            if mine and not any(id(p) in kept for p in mine):
                found.append((name, part))
    return found


def shard_target(target: Target, head: Head, device: torch.device, group: int = 0) -> str:
    """Shard the layers of a loaded target over the ranks, in place, and move its head; returns
    a line about it.

    The weights may still lie on the CPU: layer by layer they move to `device` as shards.
    group: ranks that hold a copy of the target together, neighbours by number, such as those of
    a node (train.facts.check_ranks: it divides them); 0 = all. Raises UserError for one
    process, a target without stacked layers, or a head that changes its target.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise UserError(
            "shard_target: needs several processes; start it with torchrun or accelerate "
            "launch, or leave "
            "it out"
        )
    if head.trains_target:
        raise UserError(
            f"shard_target: {type(head).kind} changes the target while it learns, and "
            "sharded weights are "
            "frozen; leave it out"
        )
    stacks = layer_stacks(target)
    if not stacks:
        raise UserError(
            f"shard_target: {type(target.body).__name__} has no stacked layers; leave it out"
        )
    _ = target.head  # asked of the whole model
    whole, spread = (
        sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
        for parts in ([target.model], [stack for _, stack in stacks])
    )
    if zero3.asked():
        if group:
            raise UserError("shard_group: is for FSDP2; leave it out, or launch without DeepSpeed")
        how = zero3.shard_layers(target, [stack for _, stack in stacks], device)
    else:
        world = dist.get_world_size()
        size = group or world
        mesh = (
            init_device_mesh(device.type, (world,))
            if size == world
            else init_device_mesh(
                device.type, (world // size, size), mesh_dim_names=("copies", "shards")
            )
        )
        for _, stack in stacks:
            for layer in stack:
                # Not the body itself: transformers finds what hidden states it may hand out by
                # its class name.
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        _gather_ahead(target, [stack for _, stack in stacks])
        how = f"by FSDP2 over {size} ranks"
        how += f", {world // size} copies" if size < world else ""
    target.model.to(device)
    head.to(device)
    target.sharded = True
    return (
        f"target: {spread / 2**20:,.0f} MiB of layers {how}, "
        f"{(whole - spread) / 2**20:,.0f} MiB on every one"
    )


def _gather_ahead(target: Target, stacks: list[nn.ModuleList]) -> None:
    """Let every layer ask for the weights of the next one before it computes.

    Each sharded layer is a root of its own, and a root's gathering waits for all computing that
    was asked for before it; asked one layer earlier, it happens beside that layer's computing.
    FSDP2 knows its layers after the first pass alone.
    """

    def once(*_: Any) -> None:
        handle.remove()
        for stack in stacks:
            for layer, following in pairwise(stack):
                assert isinstance(layer, FSDPModule)
                assert isinstance(following, FSDPModule)
                layer.set_modules_to_forward_prefetch([following])

    handle = target.body.register_forward_hook(once)
