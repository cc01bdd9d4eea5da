"""What a run says of itself before it starts: what it learns, from what, how much; and the
mistakes of its size.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.train.checkpoint import RATE, RATED
from outrider.train.config import TrainConfig, flat
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.packing import Limits


def meaning_of(cfg: TrainConfig, target: Target, rows: JoinedRows) -> dict[str, Any]:
    """What the run learns, from what, and its logistics, flat; disk.check_meaning knows which
    is which.
    """
    identity = target.identity.to_json() if target.identity else {}
    hashes = {f"target.{k}": v for k, v in identity.items() if k.endswith("sha256")}
    files = {f"data.sha256.{i}": file.sha256 for i, file in enumerate(rows.files)}
    if isinstance(cfg.data.held_out, str):
        files["data.held_out"] = "a file"  # known by its hash, wherever it lies
    found = {**flat(cfg), **hashes, "data.sha256": rows.totals.sha256, **files}
    if cfg.head.draft_vocab and any(found.get(term) for term in RATED):
        found[RATE] = "the target's own"
    return json.loads(json.dumps(found))


def limits_of(cfg: TrainConfig) -> Limits:
    """What a pass of a run may hold."""
    pack = cfg.data.max_length if cfg.data.packing else 0
    return Limits(cfg.micro_batch, cfg.micro_tokens, pack, cfg.shard_target)


def facts_of(
    cfg: TrainConfig, target: Target, rows: JoinedRows, plan: BatchPlan, head: Head, world: int
) -> dict[str, Any]:
    """Lines of the header: name -> text."""
    held = int(rows.held.sum())
    supervised = rows.totals.supervised
    facts = {
        "target": f"{target.identity.name if target.identity else 'unnamed'}, {cfg.dtype}, "
        + "frozen",
        "data": f"{plan.train.numel():,} rows to train on, {held:,} held out, "
        f"{rows.ids.numel():,} tokens, {supervised:,} supervised "
        f"({supervised / rows.ids.numel():.0%}), {len(rows.bad)} rows left out"
        f"{f' ({rows.reasons()})' if rows.bad else ''}"
        + (f", {plan.skipped} skipped as data.skip says" if cfg.data.skip else ""),
        "batches": f"{cfg.batch_size} rows over {world} rank(s), {plan.per_epoch:,} per "
        f"epoch, {cfg.steps:,} steps, {cfg.steps / plan.per_epoch:,.1f} passes over the data, "
        f"{plan.waste(limits_of(cfg), world):.1%} padding",
    }
    if mixture := plan.mixture():
        facts["files"] = mixture
    if message := rows.supervision():
        facts["turns"] = message
    if getattr(head, "coverage", 1.0) < 1:
        facts["draft vocabulary"] = f"covers {head.coverage:.2%} of the supervised tokens"
    for problem in rows.bad[:5]:
        facts[f"left out {len(facts)}"] = problem
    return facts


def self_check(rows: JoinedRows, plan: BatchPlan, tokenizer: Any) -> str:
    """The supervised text of one row, decoded: what the run will learn, for a human eye."""
    row = int(plan.train[0])
    part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    text = tokenizer.decode(rows.ids[part][rows.loss[part]].tolist())
    shown = text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"
    return f"supervised text of {rows.where(row)}: {shown!r}"


def no_memory(cfg: TrainConfig, world: int = 1) -> str:
    """What to do when a pass does not fit."""
    rows = cfg.micro_batch or cfg.batch_size // world
    if cfg.micro_tokens > cfg.data.max_length:
        return (
            f"micro_tokens: {cfg.micro_tokens} tokens do not fit into memory; set "
            f"micro_tokens={max(cfg.micro_tokens // 2, cfg.data.max_length)}"
        )
    if rows > 1 and not cfg.micro_tokens:
        return f"micro_batch: {rows} rows do not fit into memory; set micro_batch={rows // 2}"
    return (
        f"data.max_length: one row of up to {cfg.data.max_length} tokens does not fit "
        "into memory; lower it" + (", or head.chunk" if hasattr(cfg.head, "chunk") else "")
    )


def is_no_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, in whichever words a library says so."""
    text = str(error)
    said = (
        "not enough memory",
        "can't allocate memory",
        "out of memory",
        "ALLOC_FAILED",
        "Cannot allocate memory",
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in said)
    )


def is_peer_gone(error: BaseException) -> bool:
    """Whether an exception means that another process of the run no longer answers, in the words
    of gloo and of NCCL."""
    text = str(error)
    said = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and (
        "ncclRemoteError" in text or ("gloo" in text and any(words in text for words in said))
    )


def in_one_line(error: Exception, cfg: TrainConfig, world: int) -> UserError | Interrupted | None:
    """An error of a library that is no bug here, in words for the user; None for any other.
    world: number of processes."""
    if is_no_memory(error):
        return UserError(no_memory(cfg, world))
    if "Duplicate GPU detected" in str(error):  # in NCCL's words
        return UserError(
            f"num_processes: two of {world} processes have the same GPU; give one for each GPU"
        )
    if is_peer_gone(error):
        return Interrupted(
            f"one of {world} processes is gone: what it said stands above, or it was killed, often "
            "for lack of memory; the same command goes on with the last checkpoint of "
            f"{cfg.out_dir}",
            code=1,
            everywhere=True,
        )
    return None
