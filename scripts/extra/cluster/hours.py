"""How long a run takes from its prompts to its last step: the server's answers, the start, the
steps, each apart; and the bytes that it leaves.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.scripts.extra.cluster.count import FEATURES
from outrider.scripts.extra.cluster.run import PlannedRun, whole_weights

CORES = 32  # of a node, that tokenize
CHATS = 200.0  # that a core tokenizes in a second
DISK, HASH = 2e9, 1e9  # bytes/s: reading files, and hashing them once
# Seconds at every start: until all ranks of a node have imported what they run; until NCCL's
# communicators stand; until kernels are loaded and chosen and the allocator has grown.
IMPORTS, COMMUNICATORS, FIRST_PASSES = 25.0, 10.0, 30.0
ACCEPTED = 3.0  # tokens of a cycle of decoding
STEP_BYTES = 40  # of a weight: AdamW reads and writes it, its moments, its gradient twice


def speed(run: PlannedRun) -> dict[str, Any]:
    """Of a step as the plan of training makes it, and of the run."""
    cfg, gpu, found = run.cfg, run.gpu, run.found
    step = run.step(cfg.batch_size)
    around = exchange(run), update(run)
    whole = step.seconds + sum(around)
    evaluation = _evaluation(run)
    times = cfg.steps // cfg.eval.every + 1 if cfg.eval.every else 0
    hours = (cfg.steps * whole + times * evaluation) / 3600
    most = run.shape.rows * run.shape.tokens
    flops = sum(found.flops.values()) / most
    return {
        "flops_a_token": flops,
        "traffic_a_token": sum(found.traffic.values()) / most,
        "launches_a_pass": round(sum(found.launches.values())),
        "step_seconds": whole,
        "parts": {
            "target": step.target,
            "head": step.head,
            "waiting for the slowest rank": step.waiting,
            "exchange": around[0],
            "update": around[1],
        },
        "rows_a_rank": cfg.batch_size / cfg.gpus,
        "passes_a_rank": step.passes,
        "padding": step.padding,
        "slowest_rank": step.slowest,
        "tokens_a_second": step.tokens / whole,
        "tokens_a_second_and_gpu": step.tokens / whole / cfg.gpus,
        "share_of_peak_flops": flops * step.tokens / cfg.gpus / whole / gpu.flops,
        "evaluation_seconds": evaluation,
        "hours": hours,
        "gpu_hours": hours * cfg.gpus,
    }


def exchange(run: PlannedRun) -> float:
    """Seconds in which the gradient goes round, none of them hidden."""
    ranks = run.cfg.gpus
    return 2 * (ranks - 1) / ranks * 4 * run.found.trained / run.link


def update(run: PlannedRun) -> float:
    """Seconds of the optimizer."""
    return STEP_BYTES * run.found.trained / run.gpu.stream


def _evaluation(run: PlannedRun) -> float:
    """Seconds of one: prompts over the ranks (a sharded target's run them together), cycles
    that read all weights once."""
    cfg, gpu = run.cfg, run.gpu
    prompts = cfg.eval.prompts if cfg.shard_target else math.ceil(cfg.eval.prompts / cfg.gpus)
    waves = math.ceil(prompts / cfg.eval.batch_size)
    read = whole_weights(run) / gpu.stream
    launched = run.found.launches[FEATURES] * gpu.launch * 1.5
    return waves * cfg.eval.max_new_tokens / ACCEPTED * max(read + launched, run.gathered)


def data(run: PlannedRun) -> dict[str, Any]:
    """Tokens of the data, epochs, and bytes on disk."""
    cfg, found = run.cfg, run.found
    tokens = round(cfg.rows * run.lengths.tokens)
    state = found.hidden_states * run.model.text.hidden_size * run.width
    return {
        "lengths": run.lengths.source,
        "tokens": tokens,
        "tokens_a_row": run.lengths.tokens,
        "epochs": cfg.steps * cfg.batch_size / cfg.rows,
        "stored_features_bytes": tokens * state,
        "token_cache_bytes": 5 * tokens,
        "checkpoint_bytes": 12 * found.trained,
    }


def synthesis(run: PlannedRun) -> dict[str, Any]:
    """Hours in which a server writes what the data lack."""
    cfg = run.cfg
    answers = cfg.rows if cfg.answers is None else cfg.answers
    tokens = run.lengths.tokens * cfg.supervised
    rate = min(cfg.concurrency, max(answers, 1)) * cfg.answer_speed
    return {
        "answers": answers,
        "tokens_an_answer": tokens,
        "tokens_a_second": rate,
        "hours": answers * tokens / rate / 3600,
    }


def start_up(run: PlannedRun) -> dict[str, float]:
    """Seconds before the first step: the first start, and one after an interruption."""
    weights, is_gpu = whole_weights(run), not run.gpu.is_cpu
    parts = {
        "imports": IMPORTS,
        "communicators": COMMUNICATORS if run.cfg.gpus > 1 else 0.0,
        "weights": weights / DISK,
        "first_passes": FIRST_PASSES if is_gpu else 0.0,
    }
    once = {
        "tokenizing": run.cfg.rows / CHATS / (run.cfg.data.workers or CORES),
        "hashing_weights": weights / HASH,
    }
    checkpoint = 12 * run.found.trained / DISK
    every = sum(parts.values())
    return {
        **once,
        **parts,
        "checkpoint": checkpoint,
        "first": every + sum(once.values()),
        "again": every + checkpoint,
    }


def total(hours: float, written: dict[str, Any], start: dict[str, float]) -> dict[str, float]:
    """Hours of the whole, in the order in which they pass. hours: of the steps."""
    parts = {
        "synthesis": written["hours"],
        "start_up": start["first"] / 3600,
        "training": hours,
    }
    return {**parts, "hours": sum(parts.values())}
