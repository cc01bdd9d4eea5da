"""A training run on paper: memory by part, time, bytes, and what to change where it does not fit.

What a pass takes is counted (count.py); how long it takes is a roofline: every operation lasts as
long as the slowest of its arithmetic, its memory traffic and its launch, one after the other, at
stated shares of what the GPU's maker promises (gpus.py). A prediction, until a GPU has run it.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from conf.errors import UserError
from decode.models import memory, quantize
from decode.models.facts import context_length
from decode.models.load import torch_dtype
from heads import head_class
from scripts.extra.cluster.config import DryRunConfig
from scripts.extra.cluster.count import (
    BATCH,
    FEATURES,
    GRADIENTS,
    LOGITS,
    PASS,
    TARGET,
    Asked,
    Counted,
    Shape,
    count,
)
from scripts.extra.cluster.gpus import FRAGMENTS, SHARE_OF_BANDWIDTH, Gpu, gpu_of
from scripts.extra.cluster.models import Model, model_of
from scripts.extra.cluster.phantom import NAME
from train.facts import check_ranks
from train.run import room_of
from train.validate import head_config

NODE = 8  # GPUs that share a node's links
NETWORK = 50e9  # bytes/s of a GPU's share of the network: 400 Gbit/s
CORES = 32  # of a node, that tokenize
CHATS = 200.0  # that a core tokenizes in a second
DISK, HASH = 2e9, 1e9  # bytes/s: reading weights, and hashing them once
ACCEPTED = 3.0  # tokens of a cycle of decoding
STEP_BYTES = 40  # of a weight: AdamW reads and writes it, its moments, its gradient twice
_known: dict[str, Counted] = {}


@dataclass(frozen=True)
class Run:
    """A training run on paper. typed: the head's keys."""

    cfg: DryRunConfig
    gpu: Gpu
    model: Model
    typed: Any

    @functools.cached_property
    def shape(self) -> Shape:
        """The largest pass of a rank."""
        return shape_of(self.cfg, self.model)

    @functools.cached_property
    def found(self) -> Counted:
        """What its passes take."""
        return _counted(self)

    @property
    def width(self) -> int:
        """Bytes of a number of the target."""
        return torch_dtype(self.cfg.dtype).itemsize

    @property
    def can_shard(self) -> bool:
        """Whether the target's weights could be sharded, and are not."""
        trains = head_class(self.typed.kind).trains_target
        return self.cfg.gpus > 1 and not self.cfg.shard_target and not trains

    def changed(self, keys: dict[str, Any]) -> Run:
        """With other values of dotted keys."""
        cfg, typed = with_keys(self.cfg, self.typed, keys)
        return Run(cfg, self.gpu, self.model, typed)


def plan(cfg: DryRunConfig, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The whole report, as JSON has it. tell: hears what is being tried.

    Raises UserError for a GPU or a target nobody knows, a run that its own command would refuse,
    and a head that cannot be made.
    """
    run = Run(cfg, gpu_of(cfg.gpu), model_of(cfg.target), head_config(cfg.head))
    _check(cfg, run.typed)
    found = _report(run)
    if not found["memory"]["fits"]:
        found["changes"] = changes(run, found["memory"]["parts"], tell)
    return found


def _check(cfg: DryRunConfig, typed: Any) -> None:
    """Raises UserError for what the run itself would refuse."""
    check_ranks(cfg, cfg.gpus)
    if cfg.shard_target and cfg.gpus == 1:
        raise UserError("shard_target: needs several processes; set gpus=8, or leave it out")
    if cfg.shard_target and head_class(typed.kind).trains_target:
        raise UserError(
            f"shard_target: {typed.kind} changes the target while it learns, and sharded weights "
            "are frozen; leave it out"
        )


def _not_counted(cfg: DryRunConfig) -> list[str]:
    """Keys that would change the figures, and what was counted in their place."""
    keys = {
        "data.features": (cfg.data.features, "the target runs in every pass"),
        "start": (cfg.start, "a fresh head"),
        "head.draft_vocab_from": (
            cfg.head.get("draft_vocab_from", ""),
            "head.draft_vocab tokens",
        ),
    }
    return [f"{key} ({instead})" for key, (given, instead) in keys.items() if given]


def _report(run: Run) -> dict[str, Any]:
    """The report of a run as it is configured."""
    cfg, gpu, shape, found = run.cfg, run.gpu, run.shape, run.found
    return {
        "predicted": True,
        "target": run.model.name,
        "parameters": run.model.size.total,
        "head": run.typed.kind,
        "trained_parameters": found.trained,
        "gpus": cfg.gpus,
        "gpu": gpu.name,
        "pass": {"rows": shape.rows, "tokens_a_row": shape.tokens},
        "memory": _memory(run),
        "speed": _speed(run),
        "data": _data(run),
        "start_up": _start_up(run),
        "host_reads_a_pass": found.reads,
        "not_counted": _not_counted(cfg),
        "assumptions": {
            **gpu.assumed,
            "rows": cfg.rows,
            "row_tokens": cfg.row_tokens,
            "supervised": cfg.supervised,
            "accepted_length": ACCEPTED,
            "cores": CORES,
            "chats_a_core_and_second": CHATS,
            "disk": DISK,
            "hash": HASH,
            "network": NETWORK,
        },
    }


def shape_of(cfg: DryRunConfig, model: Model) -> Shape:
    """The largest pass of a rank."""
    tokens = min(cfg.data.max_length, context_length(model.text))
    mine = max(1, cfg.batch_size // cfg.gpus)
    rows = min(mine, cfg.micro_batch or mine)
    if cfg.micro_tokens:
        rows = min(rows, max(1, cfg.micro_tokens // tokens))
    return Shape(rows, tokens, cfg.supervised)


def _counted(run: Run) -> Counted:
    """The passes, counted once for equal ones."""
    cfg, gpu, shape, room = run.cfg, run.gpu, run.shape, None
    if cfg.eval.every or cfg.eval.parity:
        most = room_of(cfg, cfg.gpus)
        fits = max(1, most.tokens // shape.tokens)
        room = Shape(min(most.rows, fits), shape.tokens, shape.supervised)
    # Of several ranks the gradients lie in DDP's buckets (train/launch_keys.py), which stay.
    accumulates = cfg.gpus > 1 or shape.rows < cfg.batch_size
    meant = [run.model.key, asdict(run.typed), cfg.dtype, str(shape), str(room), accumulates]
    key = json.dumps([*meant, gpu.name])
    if key not in _known:
        device = "cpu" if gpu.is_cpu else NAME
        target = (run.model, run.typed, cfg.dtype, shape, room)
        _known[key] = count(Asked(*target, accumulates, device, gpu.seconds))
    return _known[key]


# Memory
# -------------------------------------------------------------------------------------------


def _memory(run: Run) -> dict[str, Any]:
    """Bytes of a GPU by part, at the peak of training; the peak of evaluation and gate beside
    it; whether both fit."""
    cfg, gpu, found = run.cfg, run.gpu, run.found
    wide = 8 if cfg.dtype == "float64" else 4
    parts = {
        "target": _weights(run) + found.parts.get(TARGET, 0),
        "head": found.head,
        "moments": 2 * wide * found.trained,
        "gradients": max(found.parts.get(GRADIENTS, 0), wide * found.trained),
        "activations": found.parts.get(PASS, 0) + found.parts.get("other", 0),
        "target's pass": found.parts.get(FEATURES, 0),
        "logits and laws": found.parts.get(LOGITS, 0),
        "batch": found.parts.get(BATCH, 0),
        "inside kernels": found.parts.get("inside kernels", 0),
    }
    if gpu.is_cpu and cfg.async_save and 0 < cfg.save_every < cfg.steps:
        parts["snapshot of a checkpoint"] = 3 * wide * found.trained
    steady = sum(parts[name] for name in ("target", "head", "moments"))
    steady += parts["gradients"] if cfg.gpus > 1 else 0
    steady += parts.get("snapshot of a checkpoint", 0)
    inside = sum(parts.values()) - steady
    if found.features > inside:
        parts["target's pass"] += found.features - inside
        inside = found.features
    evaluation = max(found.calibration, _decoding(run) + found.copy)
    evaluation = evaluation if cfg.eval.every or cfg.eval.parity else 0
    fragments = round(FRAGMENTS * max(inside, evaluation))
    parts["reserve"] = round(gpu.reserve) + fragments
    training = sum(parts.values())
    peak = max(training, steady + evaluation + parts["reserve"])
    return {
        "parts": parts,
        "training": training,
        "head_pass": found.peak - found.head,
        "evaluation_and_gate": steady + evaluation + parts["reserve"],
        "peak": peak,
        "of": round(gpu.memory),
        "spare": round(1 - peak / gpu.memory, 4),
        "margin": cfg.margin,
        "fits": peak <= gpu.memory * (1 - cfg.margin),
        "host_while_loading": _loading(run) * min(cfg.gpus, NODE),
    }


def _whole_weights(run: Run) -> int:
    """Bytes of the target's weights, unsharded."""
    few, size = quantize.bits(run.cfg.target.quantize) or 8 * run.width, run.model.size
    return round((size.stacked * few + (size.total - size.stacked) * 8 * run.width) / 8)


def _loading(run: Run) -> int:
    """Bytes of host memory of one rank while it loads the target. Sharded: what stays whole, and
    one weight at a time (decode/models/shards.py)."""
    if not run.cfg.shard_target:
        return _whole_weights(run)
    size = run.model.size
    return (size.total - size.stacked + size.weight) * run.width


def _weights(run: Run) -> int:
    """Bytes of the target's weights on one GPU. Sharded: three layers beside the shards,
    the one that computes, as it arrived and unpacked, and the next one as it arrives."""
    if not run.cfg.shard_target:
        return _whole_weights(run)
    size, width = run.model.size, run.width
    ranks = run.cfg.shard_group or run.cfg.gpus
    kept = (size.total - size.stacked) * width
    return round(kept + size.stacked * width / ranks + 3 * size.layer * width)


def _decoding(run: Run) -> int:
    """Bytes of cache and tree while prompts are decoded."""
    cfg, shape = run.cfg, run.shape
    prompt = int(shape.tokens * (1 - shape.supervised)) + cfg.eval.max_new_tokens
    asked = memory.Plan(cfg.eval.batch_size, prompt, getattr(run.typed, "nodes", 0))
    need = memory.estimate(run.model.text, (0, 0), cfg.dtype, asked)
    return need.cache + need.tree


# Time and bytes
# -------------------------------------------------------------------------------------------


def _speed(run: Run) -> dict[str, Any]:
    """Of a step with rows of average length, and of the run."""
    cfg, gpu, shape, found = run.cfg, run.gpu, run.shape, run.found
    mean = min(cfg.row_tokens, shape.tokens)
    link = (gpu.link if cfg.gpus <= NODE else min(NETWORK, gpu.link)) * SHARE_OF_BANDWIDTH
    ranks = cfg.gpus
    mine = max(1, cfg.batch_size // ranks)
    passes = math.ceil(mine / min(mine, _rows_a_pass(cfg, shape, mean)))
    share = mine * mean / (passes * shape.rows * shape.tokens)
    target, head = (
        max(found.seconds[part] * share, found.launches[part] * gpu.launch)
        for part in (FEATURES, PASS)
    )
    gathered = 0.0
    if cfg.shard_target:
        group = cfg.shard_group or ranks
        inside = gpu.link * SHARE_OF_BANDWIDTH if group <= NODE else link
        gathered = run.model.size.stacked * run.width * (group - 1) / group / inside
    exchange = 2 * (ranks - 1) / ranks * 4 * found.trained / link
    update = STEP_BYTES * found.trained / (gpu.bandwidth * SHARE_OF_BANDWIDTH)
    step = passes * (max(target, gathered) + head) + exchange + update
    evaluation = _evaluation(run, gathered)
    times = cfg.steps // cfg.eval.every + 1 if cfg.eval.every else 0
    seconds = cfg.steps * step + times * evaluation
    tokens = cfg.batch_size * mean
    flops = sum(found.flops.values()) * share * passes
    return {
        "flops_a_token": sum(found.flops.values()) / (shape.rows * shape.tokens),
        "traffic_a_token": sum(found.traffic.values()) / (shape.rows * shape.tokens),
        "launches_a_pass": round(sum(found.launches.values())),
        "step_seconds": step,
        "parts": {
            "target": passes * max(target, gathered),
            "head": passes * head,
            "exchange": exchange,
            "update": update,
        },
        "tokens_a_second": tokens / step,
        "tokens_a_second_and_gpu": tokens / step / ranks,
        "share_of_peak_flops": flops / step / gpu.flops,
        "evaluation_seconds": evaluation,
        "hours": seconds / 3600,
        "gpu_hours": seconds / 3600 * ranks,
    }


def _rows_a_pass(cfg: DryRunConfig, shape: Shape, mean: int) -> int:
    """Rows of a pass where all are of average length."""
    if not cfg.micro_tokens:
        return shape.rows
    return min(cfg.micro_batch or cfg.batch_size, max(1, cfg.micro_tokens // mean))


def _evaluation(run: Run, gathered: float) -> float:
    """Seconds of one: prompts over the ranks (a sharded target's run them together), cycles that
    read all weights once."""
    cfg, gpu = run.cfg, run.gpu
    prompts = cfg.eval.prompts if cfg.shard_target else math.ceil(cfg.eval.prompts / cfg.gpus)
    waves = math.ceil(prompts / cfg.eval.batch_size)
    read = _whole_weights(run) / (gpu.bandwidth * SHARE_OF_BANDWIDTH)
    launched = run.found.launches[FEATURES] * gpu.launch * 1.5
    return waves * cfg.eval.max_new_tokens / ACCEPTED * max(read + launched, gathered)


def _data(run: Run) -> dict[str, float]:
    """Tokens of the data, epochs, and bytes on disk."""
    cfg, found = run.cfg, run.found
    tokens = cfg.rows * min(cfg.row_tokens, cfg.data.max_length)
    state = found.hidden_states * run.model.text.hidden_size * run.width
    return {
        "tokens": tokens,
        "epochs": cfg.steps * cfg.batch_size / cfg.rows,
        "stored_features_bytes": tokens * state,
        "token_cache_bytes": 5 * tokens,
        "checkpoint_bytes": 12 * found.trained,
    }


def _start_up(run: Run) -> dict[str, float]:
    """Seconds before the first step: the first start, and one with a full cache."""
    weights = _whole_weights(run)
    tokenizing = run.cfg.rows / CHATS / (run.cfg.data.workers or CORES)
    hashing, load = weights / HASH, weights / DISK
    return {
        "tokenizing": tokenizing,
        "hashing_weights": hashing,
        "loading": load,
        "first": tokenizing + hashing + load,
        "again": load,
    }


# What to change
# -------------------------------------------------------------------------------------------


def changes(run: Run, held: dict[str, int], tell: Callable[[str], None]) -> dict[str, Any]:
    """The keys with which the run fits, found by trying: alone the fastest of those that do,
    else one on top of the other. {"keys": {}} where none of them helps, with "why". held: bytes
    by part of the run as it is."""

    def tried(keys: dict[str, Any]) -> dict[str, Any] | None:
        """What to tell of keys with which the run fits, None where it does not."""
        tell(f"trying {_shown(keys)}")
        outcome = _report(run.changed(keys))
        if not outcome["memory"]["fits"]:
            return None
        return {
            "keys": keys,
            "told": _shown(keys),
            "peak": outcome["memory"]["peak"],
            "tokens_a_second": outcome["speed"]["tokens_a_second"],
        }

    # Weights that no GPU holds come first.
    far = run.can_shard and _weights(run) > 0.8 * run.gpu.memory
    sharded: dict[str, Any] = {"shard_target": True} if far else {}
    base = run.changed(sharded)
    alone = [{**sharded, **option} for option in ({}, *_lighter(base))]
    fitting = [told for keys in alone if keys and (told := tried(keys))]
    if fitting:
        return max(fitting, key=lambda told: float(told["tokens_a_second"]))
    keys = sharded
    for option in [*_lighter(base), *_heavier(base)]:
        keys = keys | option
        if told := tried(keys):
            return told
    steady = sum(held[name] for name in ("target", "head", "moments", "gradients"))
    return {
        "keys": {},
        "why": f"weights and optimizer alone take {steady / 1e9:.0f} GB; take a larger gpu, more "
        "gpus with shard_target=true, or a smaller target",
    }


def _lighter(run: Run) -> Iterator[dict[str, Any]]:
    """Keys that change no result: recomputed activations, smaller passes, smaller pieces."""
    if getattr(run.typed, "activation_checkpointing", None) is False:
        yield {"head.activation_checkpointing": True}
    yield from _smaller(run)
    if getattr(run.typed, "chunk", None) not in (None, 512):
        yield {"head.chunk": 512}


def _heavier(run: Run) -> Iterator[dict[str, Any]]:
    """A sharded target, then shorter rows."""
    if run.can_shard:
        yield {"shard_target": True}
    length = run.shape.tokens // 2
    while length >= 512:
        yield {"data.max_length": length}
        length //= 2


def _smaller(run: Run) -> Iterator[dict[str, Any]]:
    """Half the pass, and half again."""
    rows = run.shape.rows // 2
    by_tokens = run.cfg.micro_tokens > 0 and not run.cfg.micro_batch
    while rows:
        yield {"micro_tokens": rows * run.shape.tokens} if by_tokens else {"micro_batch": rows}
        rows //= 2


def with_keys(cfg: DryRunConfig, typed: Any, keys: dict[str, Any]) -> tuple[DryRunConfig, Any]:
    """Copies with other values of dotted keys."""
    new, fresh = copy.deepcopy(cfg), copy.deepcopy(typed)
    for key, value in keys.items():
        group, _, name = key.rpartition(".")
        holder = fresh if group == "head" else getattr(new, group) if group else new
        setattr(holder, name, value)
    return new, fresh


def _shown(keys: dict[str, Any]) -> str:
    """As one would type them."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in keys.items()
    )
