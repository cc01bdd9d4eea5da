"""What a run says of itself before it starts: what it learns, from what, how much; and the
mistakes of its size.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from conf.errors import UserError
from decode.target import Target
from heads import HEADS, vocab, words
from heads.base import Head, HeadConfig
from heads.given import vocabulary_in
from heads.interop import served
from heads.warm import Start
from train.config import TrainConfig, flat
from train.schedule import usual_rate
from train.texts.batches import Plan, Rows
from train.texts.sharing import Limits

# Times the rate of a whole head: at 576 5e-3 to 8e-3 end alike, 3e-3 is slower and 1.2e-2 falls
# behind (docs/internals/experiments.md). LoRAs want some ten times the rate elsewhere (Schulman et
# al. 2025, "LoRA Without Regret").
LORA_RATE = 6
DRAFT_VOCAB = 8192  # where nobody says how many
# Share of the supervised tokens below which a start's draft vocabulary takes in tokens of the data:
# it bounds how many drafts are right. 4,096 tokens hold 94 % of the chats that they were chosen on
# and 80 to 88 % of other traffic (docs/internals/experiments.md). Above, new tokens cost more than
# they bring: their rows begin as the target's, beside ones that were trained.
COVERED = 0.9


def meaning_of(cfg: TrainConfig, target: Target, rows: Rows) -> dict[str, Any]:
    """What the run learns, from what, and its logistics, flat; disk.check_meaning knows which
    is which.
    """
    identity = target.identity.to_json() if target.identity else {}
    hashes = {f"target.{k}": v for k, v in identity.items() if k.endswith("sha256")}
    files = {f"data.sha256.{i}": file.sha256 for i, file in enumerate(rows.files)}
    if isinstance(cfg.data.held_out, str):
        files["data.held_out"] = "a file"  # known by its hash, wherever it lies
    if folder := cfg.head.draft_vocab_from:
        ids = vocabulary_in(folder, target.vocab_size)
        files["head.draft_vocab_from"] = hashlib.sha256(ids.numpy().data).hexdigest()
    found = {**flat(cfg), **hashes, "data.sha256": rows.sha256(), **files}
    return json.loads(json.dumps(found))


def fit_vocabulary(cfg: Any, counts: torch.Tensor) -> str:
    """Lower the draft vocabulary of head keys `cfg` to what the data can fill: with tokens
    never seen it would only draft slower. A multiple of 64 where there are so many, as kernels
    like it. Returns what to tell, "" if nothing.

    counts: [V] int64, how often each token is supervised.
    """
    wanted, seen = cfg.draft_vocab, int((counts > 0).sum())
    if not wanted or wanted <= seen or not seen:
        return ""
    cfg.draft_vocab = seen // 64 * 64 or seen
    return (
        f"head.draft_vocab: {wanted:,} wanted, but only {seen:,} different tokens are supervised "
        f"in these data: the {cfg.draft_vocab:,} most frequent are taken"
    )


def settle_vocabulary(
    cfg: Any, counts: torch.Tensor, start: Start | None = None
) -> tuple[torch.Tensor, str]:
    """(counts [V] from which a head of keys `cfg` chooses its draft vocabulary, what to tell):
    those of the data, with the tokens of a `start` behind them; or such that it chooses the one
    of head.draft_vocab_from, or the start's, as large as it is. Raises UserError for one that is
    none of this target."""
    if folder := cfg.draft_vocab_from:
        ids = vocabulary_in(folder, counts.numel())
        note = (
            f"head.draft_vocab: the {ids.numel():,} tokens of {folder}, "
            f"{int((counts[ids] > 0).sum()):,} of them supervised in these data"
        )
    elif cfg.draft_vocab is None and start is not None and start.head.ids() is not None:
        ids, note = kept_vocabulary(words.ids_of(start.head), counts)
    else:
        if cfg.draft_vocab is None:
            cfg.draft_vocab = DRAFT_VOCAB if start is None else 0
        known = counts if start is None else start.counts(counts)
        return known, fit_vocabulary(cfg, known)
    cfg.draft_vocab = ids.numel()
    return torch.zeros_like(counts).index_fill_(0, ids.to(counts.device), 1), note


def kept_vocabulary(ids: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, str]:
    """(the draft vocabulary of a head that starts from one with tokens `ids` [Vd], ascending, what
    to tell): the same, unless it covers less than COVERED of these data; then also the tokens that
    a fresh one of its size would have. counts: [V] int64, how often each is supervised."""
    size, share = ids.numel(), vocab.coverage(counts, ids)
    told = f"head.draft_vocab: the start's {size:,} tokens cover {share:.1%} of the supervised ones"
    if share >= COVERED or not counts.any():
        return ids, told
    ranks = torch.where(torch.isin(torch.arange(counts.numel()), ids), 0, counts.cpu())
    few = vocab.choose(counts, min(size, int((counts > 0).sum())))
    new = few[ranks[few] > 0]
    new = new[ranks[new].argsort(descending=True, stable=True)]
    # A multiple of 64 tokens in all, as kernels like it.
    new = new[: new.numel() - (size + new.numel()) % 64] if new.numel() >= 64 else new
    ids = torch.cat([ids, new]).sort().values
    return ids, (
        f"{told}, less than {COVERED:.0%}: {new.numel():,} more of these data, "
        f"{vocab.coverage(counts, ids):.1%}"
    )


def settle(cfg: TrainConfig, keys: HeadConfig, target: Target, plan: Plan) -> list[str]:
    """Give `cfg` the steps of its epochs and the rate of its target's size, where it leaves
    them open. `keys` are those of the head. Returns what to tell."""
    told, kind = [], HEADS[keys.kind]
    if not cfg.steps:
        cfg.steps = max(1, round(cfg.epochs * plan.per_epoch))
        told.append(f"steps: {cfg.steps:,}, epochs={cfg.epochs:g} of {plan.per_epoch:,} batches")
    if cfg.optim.lr is None:
        beside = bool(keys.lora.rank) and not kind.own_lora
        cfg.optim.lr = usual_rate(target.hidden_size, kind.rate_narrows)
        cfg.optim.lr *= LORA_RATE if beside else 1
        told.append(
            f"optim.lr: {cfg.optim.lr:g}, usual for {'a LoRA on ' if beside else ''}{kind.kind} on "
            f"a target {target.hidden_size:,} wide"
        )
    return told


def measured_head(cfg: Any, target: Target, rows: Rows) -> Head:
    """A fresh head for a measurement, its draft vocabulary fitted to the data as training
    would; what that changes is told on stderr."""
    counts, note = settle_vocabulary(cfg, rows.counts(target.vocab_size))
    if note:
        print(note, file=sys.stderr)
    return HEADS[cfg.kind].for_target(target, cfg, counts)


def facts_of(
    cfg: TrainConfig, target: Target, rows: Rows, plan: Plan, head: Head, world: int
) -> dict[str, Any]:
    """Lines of the header: name -> text."""
    held, pack = int(rows.held.sum()), cfg.data.max_length if cfg.data.packing else 0
    limits = Limits(cfg.micro_batch, cfg.micro_tokens, pack, cfg.shard_target)
    supervised = rows.supervised
    facts = {
        "target": f"{target.identity.name if target.identity else 'unnamed'}, {cfg.dtype}, "
        + ("trained with the head" if head.trains_target else "frozen"),
        "data": f"{plan.train.numel():,} rows to train on, {held:,} held out, "
        f"{rows.ids.numel():,} tokens, {supervised:,} supervised "
        f"({supervised / rows.ids.numel():.0%}), {len(rows.bad)} rows left out"
        + (f", {plan.skipped} skipped as data.skip says" if cfg.data.skip else ""),
        "batches": f"{cfg.batch_size} rows over {world} rank(s), {plan.per_epoch:,} per "
        f"epoch, {cfg.steps} steps, "
        f"{plan.waste(limits, world):.1%} padding",
    }
    if mixture := plan.mixture():
        facts["files"] = mixture
    if told := rows.supervision():
        facts["turns"] = told
    if getattr(head, "coverage", 1.0) < 1:
        facts["draft vocabulary"] = f"covers {head.coverage:.2%} of the supervised tokens"
    facts |= served.told(head, target, served.name_of(cfg.target, target))
    for problem in rows.bad[:5]:
        facts[f"left out {len(facts)}"] = problem
    return facts


def self_check(rows: Rows, plan: Plan, tokenizer: Any) -> str:
    """The supervised text of one row, decoded: what the run will learn, for a human eye."""
    row = int(plan.train[0])
    part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    text = tokenizer.decode(rows.ids[part][rows.loss[part]].tolist())
    shown = text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"
    return f"supervised text of {rows.where(row)}: {shown!r}"


def check_ranks(cfg: TrainConfig, world: int) -> None:
    """Raises UserError when the ranks cannot share a batch, or copies of the target, evenly.

    world: how many there are.
    """
    if cfg.batch_size % world:
        raise UserError(
            f"batch_size: {cfg.batch_size} is no multiple of the {world} ranks; give one that is"
        )
    if cfg.shard_group and world % cfg.shard_group:
        raise UserError(
            f"shard_group: {cfg.shard_group} does not divide the {world} ranks; give the ranks of "
            "a node"
        )


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
