"""The dry run for a reader: memory by part, hours, and what to change where it does not fit.

Hours of training are operations by formula at a share of the GPU's peak that was measured on
one H200 alone, with targets of up to 1.5 B; beyond, the range ends at what another trainer
published for 8 B. Nobody has measured it on several GPUs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from outrider.conf.errors import UserError
from outrider.train.accelerator import check_ranks
from outrider.train.config import GPUS, TrainConfig, ValidateConfig
from outrider.train.dry_run import memory
from outrider.train.dry_run.memory import Plan, active, attending, model_of, numbers, plan_of
from outrider.train.measure import peak_flops
from outrider.train.setup import DRAFT_VOCAB, PASSES

# Share of one H200's peak that training of EAGLE-3 heads reached, by operations of a token, 3
# steps: SmolLM2-135M, 122,253 tokens/s, and Qwen2.5-Coder-1.5B, 69,199 tokens/s. Between both:
# 16 layers of width 2,048, 7 steps, 3.1e9, 0.237 (docs/results/first_gpu.json).
MEASURED = ((0.36e9, 0.045), (3.6e9, 0.25))
# Times the share at the slow end. Beside other work on the same machine the run of
# first_gpu.json was 1.20 times slower; a roofline had foretold 1.23 times its speed.
SLOWER = 0.8
PUBLISHED = 0.43  # share that SpecForge published for an 8 B target on such a GPU
LARGE = 0.8  # share of a GPU's memory that a whole target may take


def _gb(count: float) -> str:
    """Return bytes as gigabytes."""
    return f"{count / 1e9:,.1f} GB"


def planned(cfg: ValidateConfig, run: TrainConfig) -> Plan:
    """Return the plan of a run. run: cfg, the head's keys typed. Raises UserError for what
    the run would refuse."""
    check_ranks(cfg.batch_size, cfg.shard_group, cfg.gpus)
    if cfg.shard_target and cfg.gpus == 1:
        raise UserError("shard_target: needs several processes; set gpus=8, or leave it out")
    typed: Any = run.head
    if typed.draft_vocab is None:
        typed = dataclasses.replace(typed, draft_vocab=DRAFT_VOCAB)
    steps = cfg.steps or max(1, round((cfg.epochs or PASSES) * cfg.rows / cfg.batch_size))
    return plan_of(dataclasses.replace(cfg, steps=steps), model_of(cfg.target), typed)


def flops_a_token(plan: Plan, length: int) -> float:
    """Return the floating point operations of a token, forward and backward, in rows of
    `length` tokens; causal attention of the target by half, that of the draft layers left
    out."""
    text, found, terms = plan.model.text, memory.kept_by(plan), plan.typed.loss
    heads = text.num_attention_heads
    spread = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    target = 2 * active(plan.model) + 2 * attending(text) * spread * length
    draft = 2 * found.products * (4 if getattr(plan.typed, "activation_checkpointing", 0) else 3)
    met = 2 * (plan.typed.draft_vocab or text.vocab_size) * text.hidden_size * plan.taught
    loss = met * (found.levels * (3 if plan.lm_head else 2) + terms.needs_distribution)
    return float(target + (draft + loss) / plan.tokens)


def shares_of_peak(flops: float) -> tuple[float, float, float]:
    """Return the least, the likely and the best: between both measured runs by the
    logarithm of the operations of a token."""
    (low, least), (high, most) = MEASURED
    place = min(1.0, max(0.0, math.log(flops / low) / math.log(high / low)))
    share = float(least * (most / least) ** place)
    return share * SLOWER, share, PUBLISHED if place == 1 else share / SLOWER


def report(plan: Plan) -> tuple[bool, str]:
    """Return whether the run fits, and what is said of it."""
    cfg, model, parts = plan.cfg, plan.model, memory.parts(plan)
    room, held = GPUS[cfg.gpu][0], sum(parts.values())
    lines = [
        f"{plan.typed.kind} ({numbers(plan.head) / 1e6:,.0f} M trained) for {model.name} "
        f"({numbers(model.built) / 1e9:.2f} B), {cfg.gpus} x {cfg.gpu}, passes of "
        f"{plan.rows} x {plan.length:,} tokens\nmemory of one GPU at the peak of training:",
        *(f"  {part:<22}{_gb(amount):>9}" for part, amount in parts.items()),
        f"  {'peak':<22}{_gb(held):>9} of {_gb(room)}: "
        + ("fits" if held <= room else f"DOES NOT FIT\nto change: {change(plan, room)}"),
        f"memory of a host while it loads the target: {_gb(memory.target_bytes(plan)[2])}",
        hours(plan) if held <= room else "training: no hours, since it does not fit",
    ]
    return held <= room, "\n".join(lines)


def hours(plan: Plan) -> str:
    """Return the hours of training on the GPUs that are named, and all that they assume."""
    cfg, row = plan.cfg, min(plan.cfg.row_tokens, plan.length)
    peak = (peak_flops(GPUS[cfg.gpu][1], "bfloat16") or math.nan) * cfg.gpus
    each, tokens = flops_a_token(plan, row), cfg.steps * cfg.batch_size * row
    shares = least, share, best = shares_of_peak(each)
    most, likely, fewest = (tokens * each / peak / one / 3600 for one in shares)
    passes = cfg.steps * cfg.batch_size / cfg.rows
    return (
        f"training: {likely:,.1f} hours ({fewest:,.1f} to {most:,.1f}) for {tokens / 1e6:,.0f} M "
        f"tokens of {each / 1e9:,.1f} GFLOP\n"
        f"assumed: {cfg.rows:,} rows (rows) of {cfg.row_tokens:,} tokens (row_tokens), "
        f"{cfg.supervised:.0%} of them answers (supervised), {passes:,.1f} passes (steps, "
        f"epochs); {share:.0%} of the GPU's peak ({best:.0%} to {least:.0%}), measured on one "
        "H200 with targets of 0.1 to 1.5 B, and nowhere else; not counted: start-up, tokenizing, "
        "evaluation, waiting for features (data.follow)"
    )


def change(plan: Plan, room: float) -> str:
    """Return the first keys, one on top of the other, with which the run fits; or that none do."""
    halves = [plan.rows >> i for i in range(1, plan.rows.bit_length())]
    tried: list[tuple[str, Any]] = [("micro_tokens", rows * plan.length) for rows in halves]
    tried += [("head.activation_checkpointing", True), ("head.chunk", 512)]
    shards = [("shard_target", True)] if plan.cfg.gpus > 1 and not plan.cfg.shard_target else []
    keys, large = dict[str, Any](), memory.target_bytes(plan)[0] > LARGE * room
    for key, value in shards + tried if large else tried + shards:
        if key.startswith("head.") and not hasattr(plan.typed, key.removeprefix("head.")):
            continue
        keys[key] = value
        if (held := sum(memory.parts(plan.changed(keys)).values())) <= room:
            return " ".join(f"{k}={v}" for k, v in keys.items()).lower() + f": {_gb(held)}"
    return "no key makes it fit: take shorter rows, a larger gpu, or a smaller target"
