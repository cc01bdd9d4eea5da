"""The dry run for a reader: memory by part, hours, and what to change where it does not fit.

Hours of training are operations by formula at a share of the GPU's peak that was measured on
one H200 alone, with targets of up to 1.5 B; beyond, the range ends at what another trainer
published for 8 B. Hours of answers are a roofline at the shares that published servers
reached. Nobody has measured either on several GPUs.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

import yaml

from outrider.conf.errors import UserError
from outrider.train.accelerator import check_ranks
from outrider.train.config import CONCURRENCY, TrainConfig, ValidateConfig
from outrider.train.dry_run import memory
from outrider.train.dry_run.answers import servers
from outrider.train.dry_run.models import Model, active, model_of, numbers
from outrider.train.dry_run.plan import Plan, plan_of
from outrider.train.flops import peak_flops
from outrider.train.setup import DRAFT_VOCAB

KNOWN = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
LARGE = 0.8  # share of a GPU's memory that a whole target may take
ROW, THOUGHT = 800, 2500  # tokens of a row on average, and of one that was thought over


def planned(cfg: ValidateConfig, run: TrainConfig) -> Plan:
    """run: cfg, the head's keys typed. Raises UserError for what the run would refuse."""
    check_ranks(cfg.batch_size, cfg.shard_group, cfg.gpus)
    if cfg.shard_target and cfg.gpus == 1:
        raise UserError("shard_target: needs several processes; set gpus=8, or leave it out")
    typed: Any = run.head
    if typed.draft_vocab is None:
        typed = dataclasses.replace(typed, draft_vocab=DRAFT_VOCAB)
    model = model_of(cfg.target)
    steps = cfg.steps or max(1, round(cfg.epochs * cfg.rows / cfg.batch_size))
    row = cfg.row_tokens or (THOUGHT if _thinks(cfg, model) else ROW)
    return plan_of(dataclasses.replace(cfg, steps=steps, row_tokens=row), model, typed)


def _thinks(cfg: ValidateConfig, model: Model) -> bool:
    told = cfg.data.chat_template_kwargs.get("enable_thinking", True)
    return model.thinks and told is not False


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
    (room, *_), held = gpus[cfg.gpu], sum(parts.values())
    lines = [
        f"{plan.typed.kind} ({numbers(plan.head) / 1e6:,.0f} M trained) for {model.name} "
        f"({numbers(model.built) / 1e9:.2f} B), {cfg.gpus} x {cfg.gpu}, passes of "
        f"{plan.rows} x {plan.length:,} tokens\nmemory of one GPU at the peak of training:",
        *(f"  {part:<22}{_gb(amount):>9}" for part, amount in parts.items()),
        f"  {'peak':<22}{_gb(held):>9} of {_gb(room)}: "
        + ("fits" if held <= room else f"DOES NOT FIT\nto change: {change(plan, room)}"),
        f"memory of a host while it loads the target: {_gb(memory.target_bytes(plan)[2])}",
        *hours(plan, held <= room),
    ]
    return held <= room, "\n".join(lines)


def hours(plan: Plan, fits: bool) -> list[str]:
    """The hours of answers and of training on the GPUs that are named, none of what does not
    fit, and all that they assume."""
    cfg, row = plan.cfg, plan.cfg.row_tokens or ROW
    thinks = "; its chat template lets it think" if _thinks(cfg, plan.model) else ""
    passes = cfg.steps * cfg.batch_size / cfg.rows
    assumed = [
        f"assumed: {cfg.rows:,} rows (rows) of {row:,} tokens (row_tokens{thinks}), "
        f"{cfg.supervised:.0%} of them answers (supervised), {passes:,.1f} passes (steps, "
        "epochs)"
    ]
    lines, ends = [], []
    for name, found in (("answers", _answers(plan, row)), ("training", _training(plan, row))):
        if found is None or (name == "training" and not fits):
            lines.append(f"{name}: no hours, since it does not fit")
            continue
        said, why, *end = found
        lines.append(f"{name}: {said}")
        assumed.append(f"  {name}: {why}")
        ends.append(end)
    if len(ends) == 2:
        low, high = map(sum, zip(*ends, strict=True))
        lines.append(f"to the end: {low:,.1f} to {high:,.1f} hours")
    assumed.append("  not counted: start-up, tokenizing, evaluation, the last answers")
    return lines + assumed


# What is said of hours, what they assume, the fewest and the most.
Hours = tuple[str, str, float, float]


def _answers(plan: Plan, row: int) -> Hours | None:
    cfg, (room, name, bandwidth) = plan.cfg, KNOWN["gpus"][plan.cfg.gpu]
    peak, answered = peak_flops(name, "bfloat16") or math.nan, row * cfg.supervised
    made = servers(plan.model, cfg.gpus, (room, peak, bandwidth), row - answered, answered)
    if made is None:
        return None
    (low, high), total = KNOWN["served"], cfg.rows * answered
    least, most = (total / made.speed / share / 3600 for share in (high, low))
    said = (
        f"{least:,.1f} to {most:,.1f} hours for {total / 1e6:,.0f} M tokens; servers: "
        f"{made.count} x {made.width} GPU, each {made.requests} requests at a time and "
        f"{low * made.speed / made.count:,.0f} to {high * made.speed / made.count:,.0f} "
        f"tokens/s (synthesize concurrency={CONCURRENCY * made.count})"
    )
    why = (
        f"{low:.0%} to {high:.0%} of a roofline in 16 bits, {bandwidth / 1e12:.2f} TB/s and "
        f"{peak / 1e12:,.0f} TFLOP/s a GPU; published runs with 8 B models, vLLM on an H100 "
        "and TensorRT-LLM on an A100, reached 51% to 76%"
    )
    return said, why, least, most


def _training(plan: Plan, row: int) -> Hours:
    cfg, row = plan.cfg, min(row, plan.length)
    peak = (peak_flops(KNOWN["gpus"][cfg.gpu][1], "bfloat16") or math.nan) * cfg.gpus
    each, tokens = flops_a_token(plan, row), cfg.steps * cfg.batch_size * row
    shares = least, share, best = shares_of_peak(each)
    most, likely, fewest = (tokens * each / peak / one / 3600 for one in shares)
    said = (
        f"{likely:,.1f} hours ({fewest:,.1f} to {most:,.1f}) for {tokens / 1e6:,.0f} M tokens "
        f"of {each / 1e9:,.1f} GFLOP"
    )
    why = (
        f"{share:.0%} of the GPU's peak ({best:.0%} to {least:.0%}), measured on one H200 "
        "with targets of 0.1 to 1.5 B, and nowhere else; the slow end is 1.25 times the "
        "likely hours, since a roofline was 1.23 times too fast where it was measured"
    )
    return said, why, fewest, most


def _gb(amount: float) -> str:
    return f"{amount / 1e9:,.1f} GB"


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
            return " ".join(f"{k}={v}" for k, v in keys.items()).lower() + f": {_gb(held)}"
    return "no key makes it fit: take shorter rows, a larger gpu, or a smaller target"


def main(cfg: ValidateConfig, run: TrainConfig) -> int:
    """Print the report; 0: it fits, 1: it does not."""
    fits, said = report(planned(cfg, run))
    print(said, flush=True)
    return 0 if fits else 1
