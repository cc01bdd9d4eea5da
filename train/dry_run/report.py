"""The dry run for a reader: memory by part, hours, and what to change where it does not fit.

Hours are operations by formula at a share of the GPU's peak that was measured on one H200 alone,
with targets of up to 1.5 B; beyond, the range ends at what another trainer published for 8 B.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

import yaml

from outrider.conf.disk import size
from outrider.conf.errors import UserError
from outrider.train.config import TrainConfig, ValidateConfig
from outrider.train.dry_run import memory
from outrider.train.dry_run.models import Model, model_of, numbers
from outrider.train.dry_run.plan import Plan, plan_of
from outrider.train.facts import check_ranks
from outrider.train.measure.speed import peak_flops
from outrider.train.resolve import DRAFT_VOCAB

KNOWN = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
LARGE = 0.8  # share of a GPU's memory that a whole target may take


def planned(cfg: ValidateConfig, run: TrainConfig) -> Plan:
    """run: cfg, the head's keys typed. Raises UserError for what the run would refuse."""
    check_ranks(run, cfg.gpus)
    if cfg.shard_target and cfg.gpus == 1:
        raise UserError("shard_target: needs several processes; set gpus=8, or leave it out")
    typed: Any = run.head
    if typed.draft_vocab is None:
        typed = dataclasses.replace(typed, draft_vocab=DRAFT_VOCAB)
    steps = cfg.steps or max(1, round(cfg.epochs * cfg.rows / cfg.batch_size))
    return plan_of(dataclasses.replace(cfg, steps=steps), model_of(cfg.target), typed)


def flops_a_token(plan: Plan, length: int) -> float:
    """Floating point operations of a token, forward and backward, in rows of `length` tokens;
    causal attention of the target by half, that of the draft layers left out."""
    text, found, terms = plan.model.text, memory.kept_by(plan), plan.typed.loss
    heads = text.num_attention_heads
    spread = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    target = 2 * active(plan.model) + 2 * text.num_hidden_layers * spread * length
    draft = 2 * found.products * (4 if getattr(plan.typed, "activation_checkpointing", 0) else 3)
    met = 2 * (plan.typed.draft_vocab or text.vocab_size) * text.hidden_size * plan.taught
    loss = met * (found.levels * (3 if plan.lm_head else 2) + terms.needs_distribution)
    return float(target + (draft + loss) / plan.tokens)


def active(model: Model) -> float:
    """Parameters of a target's layers that a token meets."""
    experts = sum(p.numel() for n, p in model.layers.named_parameters() if ".experts." in n)
    if not experts:
        return numbers(model.layers)
    many = getattr(model.text, "num_local_experts", 0) or model.text.num_experts
    return numbers(model.layers) - experts * (1 - model.text.num_experts_per_tok / many)


def shares_of_peak(flops: float) -> tuple[float, float, float]:
    """The least, the likely and the best: between both measured runs by the logarithm of the
    operations of a token."""
    (low, least), (high, most) = KNOWN["measured"]
    place = min(1.0, max(0.0, math.log(flops / low) / math.log(high / low)))
    share = float(least * (most / least) ** place)
    best = KNOWN["published"] if place == 1 else share / KNOWN["slower"]
    return share * KNOWN["slower"], share, best


def report(plan: Plan) -> tuple[bool, str]:
    """Whether the run fits, and what is said of it. Raises UserError for an unknown GPU."""
    cfg, gpus, model, parts = plan.cfg, KNOWN["gpus"], plan.model, memory.parts(plan)
    if cfg.gpu not in gpus:
        near = difflib.get_close_matches(cfg.gpu, gpus, 1, 0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"gpu: {cfg.gpu!r} is not known; {meant}choose {', '.join(gpus)}")
    (room, name), held, row = gpus[cfg.gpu], sum(parts.values()), min(cfg.row_tokens, plan.length)
    each, tokens = flops_a_token(plan, row), cfg.steps * cfg.batch_size * row
    peak = (peak_flops(name, "bfloat16") or math.nan) * cfg.gpus
    shares = least, share, best = shares_of_peak(each)
    most, hours, fewest = (tokens * each / peak / one / 3600 for one in shares)
    lines = [
        f"{plan.typed.kind} ({numbers(plan.head) / 1e6:,.0f} M trained) for {model.name} "
        f"({numbers(model.built) / 1e9:.2f} B), {cfg.gpus} x {cfg.gpu}, passes of "
        f"{plan.rows} x {plan.length:,} tokens\nmemory of one GPU at the peak of training:",
        *(f"  {part:<22}{size(amount):>9}" for part, amount in parts.items()),
        f"  {'peak':<22}{size(held):>9} of {size(room)}: "
        + ("fits" if held <= room else f"DOES NOT FIT\nto change: {change(plan, room)}"),
        f"memory of a host while it loads the target: {size(memory.target_bytes(plan)[2])}",
        f"training: {hours:,.1f} hours ({fewest:,.1f} to {most:,.1f}) for "
        f"{tokens / 1e6:,.0f} M tokens of {each / 1e9:,.1f} GFLOP",
        f"assumed: {share:.0%} of the GPU's peak ({best:.0%} to {least:.0%}); measured on one "
        "H200 with targets of 0.1 to 1.5 B, and nowhere else",
    ]
    return held <= room, "\n".join(lines)


def change(plan: Plan, room: float) -> str:
    """The first keys, one on top of the other, with which the run fits; or that none do."""
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
            return " ".join(f"{k}={v}" for k, v in keys.items()).lower() + f": {size(held)}"
    return "no key makes it fit: take shorter rows, a larger gpu, or a smaller target"


def main(cfg: ValidateConfig, run: TrainConfig) -> int:
    """Print the report; 0: it fits, 1: it does not."""
    fits, said = report(planned(cfg, run))
    print(said, flush=True)
    return 0 if fits else 1
