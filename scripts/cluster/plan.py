"""A training run on paper: memory by part, time, bytes, and what to change where it does not fit.

What a pass takes is counted (count.py); how long it takes is a roofline: every operation lasts as
long as the slowest of its arithmetic, its memory traffic and its launch, one after the other, at
stated shares of what the GPU's maker promises (gpus.py). A prediction, until a GPU has run it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from conf.errors import UserError
from decode.models import memory, quantize
from decode.models.facts import context_length
from decode.models.load import torch_dtype
from heads import HEADS
from scripts.cluster.config import DryRunConfig
from scripts.cluster.count import (
    BATCH,
    FEATURES,
    GRADIENTS,
    LOGITS,
    PASS,
    TARGET,
    Counted,
    Shape,
    count,
)
from scripts.cluster.gpus import FRAGMENTS, SHARE_OF_BANDWIDTH, Gpu, gpu_of
from scripts.cluster.models import Model, model_of
from scripts.cluster.phantom import NAME
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


def plan(cfg: DryRunConfig, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The whole report, as JSON has it. tell: hears what is being tried.

    Raises UserError for a GPU or a target nobody knows, a run that its own command would refuse,
    and a head that cannot be made.
    """
    gpu, model, typed = gpu_of(cfg.gpu), model_of(cfg.target), head_config(cfg.head)
    _check(cfg, typed)
    found = _once(cfg, gpu, model, typed)
    if not found["memory"]["fits"]:
        found["changes"] = changes(cfg, gpu, model, typed, found, tell)
    return found


def _check(cfg: DryRunConfig, typed: Any) -> None:
    """Raises UserError for what the run itself would refuse."""
    check_ranks(cfg, cfg.gpus)
    if cfg.shard_target and cfg.gpus == 1:
        raise UserError("shard_target: needs several processes; set gpus=8, or leave it out")
    if cfg.shard_target and HEADS[typed.kind].trains_target:
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


def _once(cfg: DryRunConfig, gpu: Gpu, model: Model, typed: Any) -> dict[str, Any]:
    """The report of a run as it is configured."""
    shape = shape_of(cfg, model)
    found = _counted(cfg, gpu, model, typed, shape)
    held = _memory(cfg, gpu, model, typed, shape, found)
    speed = _speed(cfg, gpu, model, shape, found)
    return {
        "predicted": True,
        "target": model.name,
        "parameters": model.size.total,
        "head": typed.kind,
        "trained_parameters": found.trained,
        "gpus": cfg.gpus,
        "gpu": gpu.name,
        "pass": {"rows": shape.rows, "tokens_a_row": shape.tokens},
        "memory": held,
        "speed": speed,
        "data": _data(cfg, model, found),
        "start_up": _start_up(cfg, model),
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


def _counted(cfg: DryRunConfig, gpu: Gpu, model: Model, typed: Any, shape: Shape) -> Counted:
    """The passes, counted once for equal ones."""
    room = None
    if cfg.eval.every or cfg.eval.parity:
        most = room_of(cfg, cfg.gpus)
        fits = max(1, most.tokens // shape.tokens)
        room = Shape(min(most.rows, fits), shape.tokens, shape.supervised)
    # Of several ranks the gradients lie in DDP's buckets (train/launch_keys.py), which stay.
    accumulates = cfg.gpus > 1 or shape.rows < cfg.batch_size
    meant = [model.key, dataclasses.asdict(typed), cfg.dtype, str(shape), str(room), accumulates]
    key = json.dumps([*meant, gpu.name])
    if key not in _known:
        on = ("cpu" if gpu.is_cpu else NAME, gpu.seconds)
        _known[key] = count(model, typed, cfg.dtype, shape, room, accumulates, on)
    return copy.deepcopy(_known[key])


# Memory
# -------------------------------------------------------------------------------------------


def _memory(
    cfg: DryRunConfig, gpu: Gpu, model: Model, typed: Any, shape: Shape, found: Counted
) -> dict[str, Any]:
    """Bytes of a GPU by part, at the peak of training; the peak of evaluation and gate beside
    it; whether both fit."""
    wide = 8 if cfg.dtype == "float64" else 4
    parts = {
        "target": _weights(cfg, model) + found.parts.get(TARGET, 0),
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
    evaluation = max(found.calibration, _decoding(cfg, model, typed, shape) + found.copy)
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
        "host_while_loading": _loading(cfg, model) * min(cfg.gpus, NODE),
    }


def _whole_weights(cfg: DryRunConfig, model: Model) -> int:
    """Bytes of the target's weights, unsharded."""
    bits = 8 * torch_dtype(cfg.dtype).itemsize
    few = quantize.bits(cfg.target.quantize) or bits
    size = model.size
    return round((size.stacked * few + (size.total - size.stacked) * bits) / 8)


def _loading(cfg: DryRunConfig, model: Model) -> int:
    """Bytes of host memory of one rank while it loads the target. Sharded: what stays whole, and
    one weight at a time (decode/models/shards.py)."""
    if not cfg.shard_target:
        return _whole_weights(cfg, model)
    size = model.size
    return (size.total - size.stacked + size.weight) * torch_dtype(cfg.dtype).itemsize


def _weights(cfg: DryRunConfig, model: Model) -> int:
    """Bytes of the target's weights on one GPU. Sharded: two layers are gathered at a time."""
    whole = _whole_weights(cfg, model)
    if not cfg.shard_target:
        return whole
    size, width = model.size, torch_dtype(cfg.dtype).itemsize
    ranks = cfg.shard_group or cfg.gpus
    kept = (size.total - size.stacked) * width
    return round(kept + size.stacked * width / ranks + 2 * size.layer * width)


def _decoding(cfg: DryRunConfig, model: Model, typed: Any, shape: Shape) -> int:
    """Bytes of cache and tree while prompts are decoded."""
    prompt = int(shape.tokens * (1 - shape.supervised)) + cfg.eval.max_new_tokens
    asked = memory.Plan(cfg.eval.batch_size, prompt, getattr(typed, "nodes", 0))
    need = memory.estimate(model.text, (0, 0), cfg.dtype, asked)
    return need.cache + need.tree


# Time and bytes
# -------------------------------------------------------------------------------------------


def _speed(
    cfg: DryRunConfig, gpu: Gpu, model: Model, shape: Shape, found: Counted
) -> dict[str, Any]:
    """Of a step with rows of average length, and of the run."""
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
    width = torch_dtype(cfg.dtype).itemsize
    gathered = 0.0
    if cfg.shard_target:
        group = cfg.shard_group or ranks
        inside = gpu.link * SHARE_OF_BANDWIDTH if group <= NODE else link
        gathered = model.size.stacked * width * (group - 1) / group / inside
    exchange = 2 * (ranks - 1) / ranks * 4 * found.trained / link
    update = STEP_BYTES * found.trained / (gpu.bandwidth * SHARE_OF_BANDWIDTH)
    step = passes * (max(target, gathered) + head) + exchange + update
    evaluation = _evaluation(cfg, gpu, model, found, gathered)
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


def _evaluation(
    cfg: DryRunConfig, gpu: Gpu, model: Model, found: Counted, gathered: float
) -> float:
    """Seconds of one: prompts over the ranks (a sharded target's run them together), cycles that
    read all weights once."""
    prompts = cfg.eval.prompts if cfg.shard_target else math.ceil(cfg.eval.prompts / cfg.gpus)
    waves = math.ceil(prompts / cfg.eval.batch_size)
    read = _whole_weights(cfg, model) / (gpu.bandwidth * SHARE_OF_BANDWIDTH)
    launched = found.launches[FEATURES] * gpu.launch * 1.5
    return waves * cfg.eval.max_new_tokens / ACCEPTED * max(read + launched, gathered)


def _data(cfg: DryRunConfig, model: Model, found: Counted) -> dict[str, float]:
    """Tokens of the data, epochs, and bytes on disk."""
    tokens = cfg.rows * min(cfg.row_tokens, cfg.data.max_length)
    width = torch_dtype(cfg.dtype).itemsize
    return {
        "tokens": tokens,
        "epochs": cfg.steps * cfg.batch_size / cfg.rows,
        "stored_features_bytes": tokens * found.hidden_states * model.text.hidden_size * width,
        "token_cache_bytes": 5 * tokens,
        "checkpoint_bytes": 12 * found.trained,
    }


def _start_up(cfg: DryRunConfig, model: Model) -> dict[str, float]:
    """Seconds before the first step: the first start, and one with a full cache."""
    weights = _whole_weights(cfg, model)
    load = weights / DISK
    return {
        "tokenizing": cfg.rows / CHATS / (cfg.data.workers or CORES),
        "hashing_weights": weights / HASH,
        "loading": load,
        "first": cfg.rows / CHATS / (cfg.data.workers or CORES) + weights / HASH + load,
        "again": load,
    }


# What to change
# -------------------------------------------------------------------------------------------


def changes(
    cfg: DryRunConfig,
    gpu: Gpu,
    model: Model,
    typed: Any,
    found: dict[str, Any],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The keys with which the run fits, found by trying: alone the fastest of those that do,
    else one on top of the other. {"keys": {}} where none of them helps, with "why"."""
    sharded, base = _sharded(cfg, gpu, model, typed)
    tried = []
    for option in _alone(base, typed, model):
        if not (sharded or option):
            continue
        tell(f"trying {_shown({**sharded, **option})}")
        new, fresh = with_keys(base, typed, option)
        outcome = _once(new, gpu, model, fresh)
        if outcome["memory"]["fits"]:
            tried.append((outcome["speed"]["tokens_a_second"], {**sharded, **option}, outcome))
    if tried:
        _, keys, outcome = max(tried, key=lambda t: t[0])
        return _told(keys, outcome)
    keys = dict(sharded)
    for option in _together(base, typed, model):
        keys |= option
        tell(f"trying {_shown(keys)}")
        new, fresh = with_keys(cfg, typed, keys)
        outcome = _once(new, gpu, model, fresh)
        if outcome["memory"]["fits"]:
            return _told(keys, outcome)
    held = found["memory"]["parts"]
    steady = sum(held[name] for name in ("target", "head", "moments", "gradients"))
    return {
        "keys": {},
        "why": f"weights and optimizer alone take {steady / 1e9:.0f} GB; take a larger gpu, more "
        "gpus with shard_target=true, or a smaller target",
    }


def _sharded(
    cfg: DryRunConfig, gpu: Gpu, model: Model, typed: Any
) -> tuple[dict[str, Any], DryRunConfig]:
    """({} or shard_target, the run with it): weights that no GPU holds come first."""
    able = cfg.gpus > 1 and not cfg.shard_target and not HEADS[typed.kind].trains_target
    if able and _weights(cfg, model) > 0.8 * gpu.memory:
        return {"shard_target": True}, dataclasses.replace(cfg, shard_target=True)
    return {}, cfg


def _alone(cfg: DryRunConfig, typed: Any, model: Model) -> Iterator[dict[str, Any]]:
    yield {}
    if getattr(typed, "activation_checkpointing", None) is False:
        yield {"head.activation_checkpointing": True}
    yield from _smaller(cfg, model)
    if getattr(typed, "chunk", None) not in (None, 512):
        yield {"head.chunk": 512}


def _together(cfg: DryRunConfig, typed: Any, model: Model) -> Iterator[dict[str, Any]]:
    if getattr(typed, "activation_checkpointing", None) is False:
        yield {"head.activation_checkpointing": True}
    yield from _smaller(cfg, model)
    if getattr(typed, "chunk", None) not in (None, 512):
        yield {"head.chunk": 512}
    if cfg.gpus > 1 and not cfg.shard_target and not HEADS[typed.kind].trains_target:
        yield {"shard_target": True}
    length = shape_of(cfg, model).tokens // 2
    while length >= 512:
        yield {"data.max_length": length}
        length //= 2


def _smaller(cfg: DryRunConfig, model: Model) -> Iterator[dict[str, Any]]:
    """Half the pass, and half again."""
    shape = shape_of(cfg, model)
    rows = shape.rows // 2
    by_tokens = cfg.micro_tokens > 0 and not cfg.micro_batch
    while rows:
        yield {"micro_tokens": rows * shape.tokens} if by_tokens else {"micro_batch": rows}
        rows //= 2


def with_keys(cfg: DryRunConfig, typed: Any, keys: dict[str, Any]) -> tuple[DryRunConfig, Any]:
    """Copies with other values of dotted keys."""
    new, fresh = copy.deepcopy(cfg), copy.deepcopy(typed)
    for key, value in keys.items():
        group, _, name = key.rpartition(".")
        holder = fresh if group == "head" else getattr(new, group) if group else new
        setattr(holder, name, value)
    return new, fresh


def _told(keys: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
    return {
        "keys": keys,
        "told": _shown(keys),
        "peak": outcome["memory"]["peak"],
        "tokens_a_second": outcome["speed"]["tokens_a_second"],
    }


def _shown(keys: dict[str, Any]) -> str:
    """As one would type them."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in keys.items()
    )
