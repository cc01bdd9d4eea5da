"""A training run on paper: memory by part, time, bytes, and what to change where it does not fit.

What a pass takes is counted (count.py); how long it takes is a roofline: every operation lasts as
long as the slowest of its arithmetic, its memory traffic and its launch, one after the other, at
stated shares of what the GPU's maker promises (gpus.py). A prediction, until a GPU has run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.models import memory
from outrider.scripts.extra.cluster import hours
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.count import BATCH, FEATURES, GRADIENTS, LOGITS, PASS, TARGET
from outrider.scripts.extra.cluster.gpus import FRAGMENTS, gpu_of
from outrider.scripts.extra.cluster.lengths import lengths_of
from outrider.scripts.extra.cluster.models import model_of
from outrider.scripts.extra.cluster.run import NETWORK, NODE, PlannedRun, whole_weights
from outrider.train.facts import check_ranks
from outrider.train.validate import head_config

MOST_ROWS = 64  # of a rank, that are looked at
WORTH = 1.2  # times the tokens/s that twice the rows must bring: larger steps are fewer, too


def plan(cfg: DryRunConfig, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The whole report, as JSON has it. tell: hears what is being tried.

    Raises UserError for a GPU or a target nobody knows, a run that its own command would refuse,
    and a head that cannot be made.
    """
    gpu, model, typed = gpu_of(cfg.gpu), model_of(cfg.target), head_config(cfg.head)
    _check(cfg, typed)
    lengths, cfg = lengths_of(cfg, model)
    if not cfg.steps:
        cfg = replace(cfg, steps=max(1, round(cfg.epochs * lengths.per_epoch(cfg))))
    run = PlannedRun(cfg, gpu, model, typed, lengths)
    found = _report(run)
    if not found["memory"]["fits"]:
        found["changes"] = changes(run, found["memory"]["parts"], tell)
    elif better := recommended(run, found["speed"]):
        found["recommended"] = better
    return found


def _check(cfg: DryRunConfig, typed: Any) -> None:
    """Raises UserError for what the run itself would refuse."""
    check_ranks(cfg, cfg.gpus)
    if cfg.shard_target and cfg.gpus == 1:
        raise UserError("shard_target: needs several processes; set gpus=8, or leave it out")


def _not_counted(cfg: DryRunConfig) -> list[str]:
    """Keys that would change the figures, and what was counted in their place."""
    keys = {
        "data.features": (cfg.data.features, "the target runs in every pass"),
        "start": (cfg.start, "a fresh head"),
    }
    return [f"{key} ({instead})" for key, (given, instead) in keys.items() if given]


def _report(run: PlannedRun) -> dict[str, Any]:
    """The report of a run as it is configured."""
    cfg, gpu, shape, found = run.cfg, run.gpu, run.shape, run.found
    speed, written, start = hours.speed(run), hours.synthesis(run), hours.start_up(run)
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
        "speed": speed,
        "data": hours.data(run),
        "synthesis": written,
        "start_up": start,
        "total": hours.total(speed["hours"], written, start),
        "host_reads_a_pass": found.reads,
        "not_counted": _not_counted(cfg),
        "assumptions": {
            **gpu.assumed,
            "rows": cfg.rows,
            "row_tokens": cfg.row_tokens,
            "row_sigma": cfg.row_sigma,
            "supervised": cfg.supervised,
            "concurrency": cfg.concurrency,
            "answer_speed": cfg.answer_speed,
            "accepted_length": hours.ACCEPTED,
            "cores": hours.CORES,
            "chats_a_core_and_second": hours.CHATS,
            "disk": hours.DISK,
            "hash": hours.HASH,
            "network": NETWORK,
        },
    }


# Memory
# -------------------------------------------------------------------------------------------


def _memory(run: PlannedRun) -> dict[str, Any]:
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
        "logits and distributions": found.parts.get(LOGITS, 0),
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


def _loading(run: PlannedRun) -> int:
    """Bytes of host memory of one rank while it loads the target. Sharded: what stays whole,
    and one weight at a time (decode/models/shards.py)."""
    if not run.cfg.shard_target:
        return whole_weights(run)
    size = run.model.size
    return (size.total - size.stacked + size.weight) * run.width


def _weights(run: PlannedRun) -> int:
    """Bytes of the target's weights on one GPU. Sharded: three layers beside the shards,
    the one that computes, as it arrived and unpacked, and the next one as it arrives."""
    if not run.cfg.shard_target:
        return whole_weights(run)
    size, width = run.model.size, run.width
    ranks = run.cfg.shard_group or run.cfg.gpus
    kept = (size.total - size.stacked) * width
    return round(kept + size.stacked * width / ranks + 3 * size.layer * width)


def _decoding(run: PlannedRun) -> int:
    """Bytes of cache and tree while prompts are decoded."""
    cfg, shape = run.cfg, run.shape
    prompt = int(shape.tokens * (1 - shape.supervised)) + cfg.eval.max_new_tokens
    requested = memory.MemoryPlan(cfg.eval.batch_size, prompt, getattr(run.typed, "nodes", 0))
    need = memory.estimate(run.model.text, (0, 0), cfg.dtype, requested)
    return need.cache + need.tree


# What to change
# -------------------------------------------------------------------------------------------


def changes(run: PlannedRun, held: dict[str, int], tell: Callable[[str], None]) -> dict[str, Any]:
    """The keys with which the run fits, found by trying: alone the fastest of those that do,
    else one on top of the other. {"keys": {}} where none of them helps, with "why". held:
    bytes by part of the run as it is."""

    def tried(keys: dict[str, Any]) -> dict[str, Any] | None:
        """What to tell of keys with which the run fits, None where it does not."""
        tell(f"trying {_shown(keys)}")
        other = run.changed(keys)
        held = _memory(other)
        if not held["fits"]:
            return None
        return {
            "keys": keys,
            "told": _shown(keys),
            "peak": held["peak"],
            "tokens_a_second": hours.speed(other)["tokens_a_second"],
        }

    # Weights that no GPU holds come first.
    far = run.can_shard and _weights(run) > 0.8 * run.gpu.memory
    sharded: dict[str, Any] = {"shard_target": True} if far else {}
    base = run.changed(sharded)
    alone = [{**sharded, **option} for option in ({}, *_lighter(base))]
    fitting = [choice for keys in alone if keys and (choice := tried(keys))]
    if fitting:
        return max(fitting, key=lambda choice: float(choice["tokens_a_second"]))
    keys = sharded
    for option in [*_lighter(base), *_heavier(base)]:
        keys = keys | option
        if choice := tried(keys):
            return choice
    steady = sum(held[name] for name in ("target", "head", "moments", "gradients"))
    return {
        "keys": {},
        "why": f"weights and optimizer alone take {steady / 1e9:.0f} GB; take a larger gpu, more "
        "gpus with shard_target=true, or a smaller target",
    }


def recommended(run: PlannedRun, speed: dict[str, Any]) -> dict[str, Any] | None:
    """The batch size that wastes less: twice the rows a rank as long as that is worth it; None
    where it is not for this run. speed: of the run."""
    cfg, around = run.cfg, hours.exchange(run) + hours.update(run)

    def keys(rows: int) -> dict[str, Any]:
        """Passes stay as large as they are."""
        same = {"micro_tokens": run.shape.rows * run.shape.tokens}
        sized = cfg.micro_tokens or cfg.micro_batch
        return {"batch_size": rows * cfg.gpus} | ({} if sized else same)

    best, pace = 0, speed["tokens_a_second"]
    rows = 2 * cfg.batch_size // cfg.gpus
    while cfg.gpus > 1 and rows <= MOST_ROWS and rows * cfg.gpus <= cfg.rows:
        step = run.changed(keys(rows)).step(rows * cfg.gpus)
        faster = step.tokens / (step.seconds + around)
        if faster < WORTH * pace:
            break
        best, pace, rows = rows, faster, 2 * rows
    if not best:
        return None
    held = _memory(run.changed(keys(best)))
    if not held["fits"]:
        return None
    return {
        "keys": keys(best),
        "told": _shown(keys(best)),
        "rows_a_rank": best,
        "peak": held["peak"],
        "tokens_a_second": pace,
        "times_as_fast": pace / speed["tokens_a_second"],
    }


def _lighter(run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Keys that change no result: recomputed activations, smaller passes, smaller pieces."""
    if getattr(run.typed, "activation_checkpointing", None) is False:
        yield {"head.activation_checkpointing": True}
    yield from _smaller(run)
    if getattr(run.typed, "chunk", None) not in (None, 512):
        yield {"head.chunk": 512}


def _heavier(run: PlannedRun) -> Iterator[dict[str, Any]]:
    """A sharded target, then shorter rows."""
    if run.can_shard:
        yield {"shard_target": True}
    length = run.shape.tokens // 2
    while length >= 512:
        yield {"data.max_length": length}
        length //= 2


def _smaller(run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Half the pass, and half again."""
    rows = run.shape.rows // 2
    by_tokens = run.cfg.micro_tokens > 0 and not run.cfg.micro_batch
    while rows:
        yield {"micro_tokens": rows * run.shape.tokens} if by_tokens else {"micro_batch": rows}
        rows //= 2


def _shown(keys: dict[str, Any]) -> str:
    """As one would type them."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in keys.items()
    )
