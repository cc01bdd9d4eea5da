"""A target that no single device can hold, spread over the ranks: FSDP2's fully_shard on each
of its layers.

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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, share_comm_ctx
from torch.distributed.tensor import DTensor

from outrider.conf.errors import UserError
from outrider.decode.models import quantize
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.load import load_target
from outrider.decode.models.shards import Shards, layer_stacks
from outrider.decode.target import Target

COPIES = ("copies", "shards")  # the dimensions of ranks of which several groups hold a copy


def loaded(
    keys: TargetConfig, dtype: str, device: torch.device, group: int, copied: bool
) -> tuple[Target, str]:
    """Load the target of a run whose target is sharded; return it and a line about its shards.

    Each rank keeps its own part of every layer's weights as it reads them, and the target
    comes back sharded, unless something needs the layers whole (`_needs_whole`): it then
    is on the CPU, for shard_target once the head was made. group: as in shard_target.
    copied: the head copies layers of it. Raises UserError for one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise UserError(
            "shard_target: needs several processes; start it with torchrun or accelerate launch, "
            "or leave it out"
        )
    if why := _needs_whole(keys, copied):
        return load_target(keys, dtype, "cpu"), f"read whole by every rank ({why})"
    size = group or dist.get_world_size()
    shards = Shards(dist.get_rank() % size, size, device)
    target = load_target(keys, dtype, "cpu", shards=shards)
    return target, shard_target(target, device, group, shards) if shards.count else ""


def _needs_whole(keys: TargetConfig, copied: bool) -> str:
    """Return why every rank must read the weights whole; "" where it need not."""
    if keys.kind == "tiny":
        return "target=tiny has no files"
    if keys.quantize != quantize.NONE:
        return f"target.quantize={keys.quantize} packs whole weights"
    return "head.from_target_layers copies layers of it" if copied else ""


def shard_target(
    target: Target, device: torch.device, group: int, shards: Shards | None = None
) -> str:
    """Shard the layers of a loaded target over the ranks, in place; returns a line about it.

    Weights that still lie on the CPU move to `device` layer by layer, as shards; empty ones
    get the parts in `shards`. group: ranks that hold a copy of the target together,
    neighbours by number, such as those of a node (train.accelerator.check_ranks: it divides
    them); 0 = all. Raises UserError for a target without stacked layers.
    """
    from torch.distributed.device_mesh import init_device_mesh

    stacks = layer_stacks(target.model)
    if not stacks:
        raise UserError(
            f"shard_target: {type(target.body).__name__} has no stacked layers; leave it out"
        )
    whole, spread = (
        sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
        for parts in ([target.model], [stack for _, stack in stacks])
    )
    world = dist.get_world_size()
    size = group or world
    shape, names = ((world,), None) if size == world else ((world // size, size), COPIES)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for name, stack in stacks:
        for number, layer in enumerate(stack):
            _shard(layer, mesh, f"{name}.{number}", shards, device)
    _gather_ahead(target, [stack for _, stack in stacks])
    target.model.to(device)
    target.sharded = True
    _ = target.head  # remembered; the ranks must ask it together
    return (
        f"target: {spread / 2**20:,.0f} MiB of layers by FSDP2 over {size} ranks"
        + (f", {world // size} copies" if size < world else "")
        + f", {(whole - spread) / 2**20:,.0f} MiB on every one"
        + (f", read as shards, {shards.largest / 2**20:,.0f} MiB at a time" if shards else "")
    )


def _shard(
    layer: nn.Module,
    mesh: DeviceMesh,
    name: str,
    shards: Shards | None,
    device: torch.device,
) -> None:
    """Shard one layer; weights that are empty get this rank's part."""
    from torch.distributed.fsdp import fully_shard

    parts: dict[str, Tensor] = {}
    for weight, stub in layer.named_parameters():
        if stub.is_meta:
            try:
                assert shards is not None
                parts[weight] = shards.take(stub)
            except LookupError:
                raise UserError(
                    f"shard_target: {name}.{weight} was not read; leave shard_target out"
                ) from None
    # Not the body itself: transformers finds what hidden states it may hand out by its class
    # name.
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if not parts:
        return
    layer._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for weight, shard in layer.named_parameters():
        if weight in parts:
            assert isinstance(shard, DTensor)
            with torch.no_grad():
                shard.to_local().copy_(parts.pop(weight))


def _gather_ahead(target: Target, stacks: list[nn.ModuleList]) -> None:
    """Let every layer ask for the weights of the next one before it computes, on streams
    that all layers share.

    Each sharded layer is a root of its own, and a root's gathering waits for all computing
    that was asked for before it; asked one layer earlier, it happens beside that layer's
    computing. A root also makes streams of its own, and the allocator keeps what was
    gathered on one stream from all others: as many copies of a layer as there are streams.
    FSDP2 knows its layers and their streams after the first pass alone; until then a
    layer's memory goes back at once.
    """
    ran: list[FSDPModule] = []

    def noted(layer: nn.Module, *_: Any) -> None:
        assert isinstance(layer, FSDPModule)
        if layer not in ran:
            ran.append(layer)
        torch.cuda.empty_cache()

    def once(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        share_comm_ctx(ran)
        for stack in map(list, stacks):
            for layer, following in pairwise(layer for layer in ran if layer in stack):
                layer.set_modules_to_forward_prefetch([following])
        torch.cuda.empty_cache()

    handles = [layer.register_forward_hook(noted) for stack in stacks for layer in stack]
    handles.append(target.body.register_forward_hook(once))
