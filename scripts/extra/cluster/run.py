"""A training run on paper: its keys, its target, its GPU, and what is counted of it."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.decode.models import quantize
from outrider.decode.models.facts import context_length
from outrider.decode.models.load import torch_dtype
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.count import (
    FEATURES,
    MOST_TOKENS,
    PASS,
    PassCosts,
    PassShape,
    PassSpec,
    count,
    seconds,
)
from outrider.scripts.extra.cluster.gpus import Gpu
from outrider.scripts.extra.cluster.lengths import Lengths
from outrider.scripts.extra.cluster.models import Model
from outrider.scripts.extra.cluster.phantom import NAME
from outrider.scripts.extra.cluster.steps import (
    Pair,
    PlannedStep,
    Size,
    fitted,
    sizes,
    step_of,
    trials,
)
from outrider.train.facts import limits_of
from outrider.train.run import room_of

NODE = 8  # GPUs that share a node's links
NETWORK = 50e9  # bytes/s of a GPU's share of the network: 400 Gbit/s
_known: dict[str, PassCosts] = {}
_costs: dict[str, tuple[Size, Size]] = {}


@dataclass(frozen=True)
class PlannedRun:
    """A training run on paper. typed: the head's keys."""

    cfg: DryRunConfig
    gpu: Gpu
    model: Model
    typed: Any
    lengths: Lengths

    @functools.cached_property
    def shape(self) -> PassShape:
        """The largest pass of a rank."""
        return shape_of(self.cfg, self.model)

    @functools.cached_property
    def found(self) -> PassCosts:
        """What its passes take, counted once for equal ones."""
        requested = self._requested
        key = json.dumps(
            [self._meant, str(requested.shape), str(requested.room), requested.accumulates]
        )
        if key not in _known:
            _known[key] = count(requested)
        return _known[key]

    @functools.cached_property
    def _requested(self) -> PassSpec:
        cfg, gpu, shape, room = self.cfg, self.gpu, self.shape, None
        if cfg.eval.every or cfg.eval.parity:
            most = room_of(cfg, cfg.gpus)
            fits = max(1, most.tokens // shape.tokens)
            room = PassShape(min(most.rows, fits), shape.tokens, shape.supervised)
        # Of several ranks the gradients lie in DDP's buckets (train/launch_keys.py), which stay.
        accumulates = cfg.gpus > 1 or shape.rows < cfg.batch_size
        device = "cpu" if gpu.is_cpu else NAME
        target = (self.model, self.typed, cfg.dtype, shape, room)
        return PassSpec(*target, accumulates, device, gpu.seconds)

    @property
    def _meant(self) -> list[Any]:
        """What a pass depends on beside its size: of the GPU its pace, not its memory."""
        gpu = self.gpu
        pace = [gpu.is_cpu, gpu.flops * gpu.share_of_flops, gpu.stream, gpu.launch]
        return [self.model.key, asdict(self.typed), self.cfg.dtype, pace]

    @property
    def link(self) -> float:
        """Bytes/s of a GPU to all others."""
        most = self.gpu.link if self.cfg.gpus <= NODE else min(NETWORK, self.gpu.link)
        return most * self.gpu.share_of_bandwidth

    @property
    def gathered(self) -> float:
        """Seconds in which a sharded target's weights come to a GPU; 0: they lie there."""
        if not self.cfg.shard_target:
            return 0.0
        group = self.cfg.shard_group or self.cfg.gpus
        link = self.gpu.link * self.gpu.share_of_bandwidth if group <= NODE else self.link
        return self.model.size.stacked * self.width * (group - 1) / group / link

    def step(self, batch_size: int) -> PlannedStep:
        """A step of so many rows, counted from passes as large as this run's."""
        limits = limits_of(self.cfg)
        target, head = self._costs
        gathered = self.gathered

        def cost(size: Size) -> Pair:
            parts = (sum(a * b for a, b in zip(each, size, strict=True)) for each in (target, head))
            return max(next(parts), gathered), next(parts)

        plan, steps = self.lengths.plan(self.cfg, batch_size)
        return step_of(plan, steps, self.cfg.gpus, limits, cost)

    @property
    def _costs(self) -> tuple[Size, Size]:
        """What each of `sizes` costs in the target's and in the head's pass."""
        shape, limits = self.shape, limits_of(self.cfg)
        most = min(limits.tokens or shape.rows * shape.tokens, MOST_TOKENS - 1)
        passes = trials(most, shape.tokens, limits.rows or most)
        key = json.dumps([self._meant, shape.supervised, limits.pack, passes])
        if key not in _costs:
            found = seconds(self._requested, passes, limits.pack)
            size = [sizes(lengths, limits.pack) for lengths in passes]
            target, head = (
                fitted(size, [trial[part] for trial in found]) for part in (FEATURES, PASS)
            )
            _costs[key] = target, head
        return _costs[key]

    @property
    def width(self) -> int:
        """Bytes of a number of the target."""
        return torch_dtype(self.cfg.dtype).itemsize

    @property
    def can_shard(self) -> bool:
        """Whether the target's weights could be sharded, and are not."""
        return self.cfg.gpus > 1 and not self.cfg.shard_target

    def changed(self, keys: dict[str, Any]) -> PlannedRun:
        """With other values of dotted keys."""
        cfg, typed = with_keys(self.cfg, self.typed, keys)
        longest = shape_of(cfg, self.model).tokens
        return PlannedRun(cfg, self.gpu, self.model, typed, self.lengths.cut(longest))


def shape_of(cfg: DryRunConfig, model: Model) -> PassShape:
    """The largest pass of a rank."""
    tokens = min(cfg.data.max_length, context_length(model.text))
    mine = max(1, cfg.batch_size // cfg.gpus)
    rows = min(mine, cfg.micro_batch or mine)
    if cfg.micro_tokens:
        rows = min(rows, max(1, cfg.micro_tokens // tokens))
    return PassShape(rows, tokens, cfg.supervised)


def with_keys(cfg: DryRunConfig, typed: Any, keys: dict[str, Any]) -> tuple[DryRunConfig, Any]:
    """Copies with other values of dotted keys."""
    for key, value in keys.items():
        group, _, name = key.rpartition(".")
        if group == "head":
            typed = replace(typed, **{name: value})
        elif group:
            cfg = replace(cfg, **{group: replace(getattr(cfg, group), **{name: value})})
        else:
            cfg = replace(cfg, **{name: value})
    return cfg, typed


def whole_weights(run: PlannedRun) -> int:
    """Bytes of the target's weights, unsharded."""
    few, size = quantize.bits(run.cfg.target.quantize) or 8 * run.width, run.model.size
    return round((size.stacked * few + (size.total - size.stacked) * 8 * run.width) / 8)
