"""Before the first step: target, data, head, optimizer, and what is in the run folder.

`resolve` is the one place where the configuration of a run is completed: what a command
line leaves open follows from the target, the data and the run that is in the folder. A
configuration is frozen, and nothing changes one afterwards: what the header prints is what
the checkpoints hold and what every later line reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from outrider.conf.disk import check_space
from outrider.conf.errors import Interrupted, UserError
from outrider.decode.models.load import load_target
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head, HeadConfig
from outrider.heads.batch import hash_u63
from outrider.heads.warm import Start
from outrider.train import checkpoint as disk
from outrider.train.accelerator import barrier, main_first, wait_for
from outrider.train.compiled import Compiled
from outrider.train.config import OptimConfig, TrainConfig, defaults, flat, usual_rate
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from outrider.train.data.tokens import PASSED
from outrider.train.features import MANIFEST, FeatureStore, computed_in
from outrider.train.features import identity_of as features_identity
from outrider.train.log import Log, settings_of
from outrider.train.measure import Flops, is_no_memory, profiler
from outrider.train.metrics import Clock
from outrider.train.resuming import check_meaning, identity_of, meaning_hash, meaning_of
from outrider.train.run import Run
from outrider.train.sharding import loaded, shard_target
from outrider.train.signals import Stop

DRAFT_VOCAB = 8192  # where nobody says how many
PASSES = 8  # over the same rows, which taught nearly what as many new rows would


def begin(
    cfg: TrainConfig,
    kind: type[Head],
    accelerator: Accelerator,
    stop: Stop,
    given: tuple[Target, JoinedRows] | None = None,
) -> Run:
    """Load target and data, make the head, resume what is in the run folder, say what
    follows. given: target and rows in place of those that the keys name, for a
    measurement."""
    out, device, main = Path(cfg.out_dir), accelerator.device, accelerator.is_main_process
    target, sharding = (given[0], "") if given else _target(cfg, device)
    rows = given[1] if given else rows_of(cfg.data, target, out if main else None)
    follow = cfg.data.follow_batches if cfg.data.follow else 0
    plan = BatchPlan(rows, cfg.batch_size, cfg.data.window, cfg.seed, cfg.data.skip, follow)

    checkpoint, state, notes = disk.last_state(out, accelerator)
    counts = rows.counts(target.vocab_size)
    made = resolve(cfg, kind, target, counts, plan.per_epoch, state.meaning)
    cfg = made.cfg
    head, begun = first_head(made, kind, target)
    if cfg.shard_target and not target.sharded:
        whole, sharding = sharding, shard_target(target, device, cfg.shard_group)
        sharding = f"{sharding}, {whole}" if whole else sharding
    head.to(device)
    optimizer = _optimizer(cfg.optim, head)
    store = _features(cfg, target, head, rows) if cfg.data.features else None
    meaning = meaning_of(flat(cfg), target, rows)
    if store and store.stored != cfg.dtype:
        meaning["features"] = f"stored in {store.stored}"
    if made.start:
        meaning["start_sha256"] = made.start.sha256
    if checkpoint is not None:
        # Other rows would shift the rounds, whose files may be gone.
        early = cfg.data.follow_delete or follow and state.step < plan.per_epoch
        fixed = ("data.skip",) if early else ()
        changes = check_meaning(state.meaning, meaning, out, defaults(cfg), fixed)
        disk.restore(checkpoint, head, optimizer)
        notes.append(f"resuming {out} at step {state.step} of {cfg.steps}")
        notes += [f"changed, which is allowed: {line}" for line in changes]
    state.meaning = meaning
    _check_space(out, head, cfg.keep)

    log, clock = _log(cfg, main, state), Clock(device)
    facts = facts_of(cfg, target, plan, head, accelerator.num_processes)
    facts |= {"start": made.start.path} if made.start else {}
    facts |= {"features": f"{store.folder}, in {store.stored}"} if store else {}
    for note in notes:
        log.say(note)
    log.header(head, meaning_hash(flat(cfg))[:12], facts)
    learned = self_check(rows, plan, target.tokenizer)
    for note in filter(None, (learned, *made.notes, *begun, sharding)):
        log.say(note)
    where = device if cfg.compile == "auto" else None
    compiled = Compiled(head.train(), None if store else target, where, log.say)
    model = _called(accelerator, head)
    parts = accelerator, stop, target, rows, plan, head, model, store, optimizer, state, log
    saver = disk.Saver(out, cfg.keep, accelerator, state.step or -1)
    profile = profiler(cfg.profile, state.step, out) if main else None
    return Run(cfg, *parts, saver, clock, Flops(cfg.dtype, device), profile, compiled)


def _check_space(out: Path, head: Head, keep: int) -> None:
    """Raise UserError where the disk does not hold what the run keeps at one time: checkpoints
    with AdamW's two moments, one more while it is written, and two heads."""
    parts = [p.numel() * p.element_size() for p in head.parameters()]
    learned = sum(p.numel() * 8 for p in head.parameters() if p.requires_grad)
    need = (keep + 1) * (sum(parts) + learned) + 2 * sum(parts)
    check_space("out_dir", out, need, "give another folder, or lower keep")


def _log(cfg: TrainConfig, main: bool, state: disk.State) -> Log:
    """Return the log of a run, its trackers open."""
    out = Path(cfg.out_dir)
    log = Log(out, main, state)
    if main:
        names = [*cfg.trackers, *(["wandb"] if cfg.wandb != "off" else [])]
        identity = identity_of(out, state.meaning)[:16]
        settings = settings_of(out, cfg.wandb_project, cfg.wandb, identity)
        log.trackers.open(names, settings, flat(cfg) if not state.step else None)
    return log


def _target(cfg: TrainConfig, device: torch.device) -> tuple[Target, str]:
    """(the target of a run, a line about its shards)."""
    copied = bool(getattr(cfg.head, "from_target_layers", 0))
    decodes = bool(cfg.eval.every or cfg.eval.parity)
    if cfg.shard_target:
        target, how = loaded(cfg.target, cfg.dtype, device, cfg.shard_group, copied)
    else:
        stored = cfg.data.features and not (decodes or copied)
        target = load_target(cfg.target, cfg.dtype, device, layers=0 if stored else None)
        how = ""
    if decodes and (target.sharded or not cfg.shard_target):
        target.probe()  # what cannot be decoded is refused now, not after the last step
    return target, how


def _features(cfg: TrainConfig, target: Target, head: Head, rows: JoinedRows) -> FeatureStore:
    """Return the opened features of a run: what the head reads, and the last hidden state."""
    _ = target.head  # asks the layers how logits follow; later they may be gone
    identity = features_identity(target, rows, computed_in(cfg.dtype, cfg.target.quantize))
    reads = dict.fromkeys((*head.taps, target.num_layers))
    place = Path(cfg.data.features).expanduser()
    if cfg.data.follow:
        wait_for(place / MANIFEST)
    return FeatureStore(place, identity, [*reads], rows, cfg.data.follow)


def rows_of(data: DataConfig, target: Target, out: Path | None = None) -> JoinedRows:
    """Return the rows of tokens, with a cache made by one rank for all; those left out are
    listed in the run folder `out`."""
    size = target.vocab_size, target.context_length
    with main_first("rows") if data.cache else nullcontext():
        rows = load_rows(data, target.tokenizer, target.eos_ids, *size)
    barrier("rows")  # in the first collective nobody may wait for tokens
    if out is not None:
        rows.list_bad(out)
    return rows


def first_head(made: Resolved, kind: type[Head], target: Target) -> tuple[Head, list[str]]:
    """(the head of class `kind` before its first step, with the keys of `made`: a fresh one,
    or one with the weights of another; what to say of it).

    Raises UserError where the start's weights have no place in it.
    """
    cfg = made.cfg
    torch.manual_seed(hash_u63(cfg.seed, "head"))
    head = kind.for_target(target, cfg.head, made.ranked)
    if cfg.dtype == "float64":
        head.double()
    ids = head.ids()
    if ids is not None:
        head.coverage = vocab.coverage(made.counts, ids)
    return head, [made.start.give(head)] if made.start else []


def _called(accelerator: Accelerator, head: Head) -> nn.Module:
    """Return the head as it is called: in DDP on several ranks."""
    if accelerator.num_processes == 1:
        return head
    model: nn.Module = accelerator.prepare(head)
    # No buffer changes while a head learns. As an argument it has another name in each of two
    # generations of torch, and Accelerate hands on the one that is deprecated.
    model.broadcast_buffers = False  # type: ignore[assignment]
    return model


def _optimizer(keys: OptimConfig, head: Head) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad],
        lr=keys.lr or 0.0,  # of every step: learning_rate
        betas=(keys.beta1, keys.beta2),
        eps=keys.eps,
        weight_decay=keys.weight_decay,
        fused=True,
    )


# The configuration, completed
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """A run whose every key is settled. counts: [V] int64, how often each token is
    supervised; ranked: the same, such that a fresh head chooses its draft vocabulary from
    it. start: the head that it starts from. notes: what was settled, in lines.
    """

    cfg: TrainConfig
    counts: Tensor
    ranked: Tensor
    start: Start | None
    notes: list[str]


def resolve(
    cfg: TrainConfig,
    kind: type[Head],
    target: Target,
    counts: Tensor,
    per_epoch: int,
    earlier: Mapping[str, Any] | None = None,
) -> Resolved:
    """`cfg` with the steps of its epochs, the learning rate of its target's width, and the
    keys of a head of class `kind` as the target, the data and the head at cfg.start settle
    them.

    counts: [V] int64, how often each token is supervised. per_epoch: batches of an epoch.
    earlier: the meaning of the run that goes on (train.checkpoint), whose learning rate is
    kept where nobody gives another.

    Raises UserError for keys that the target or the data cannot carry, and where cfg.start is
    no head that this one can start from.
    """
    notes = []
    if not cfg.steps:
        # With minutes, which end it before.
        epochs = cfg.epochs or (1 if cfg.data.follow_delete else PASSES)
        cfg = replace(cfg, steps=max(1, round(epochs * per_epoch)))
        most = "at most " if cfg.minutes else ""
        notes.append(f"steps: {most}{cfg.steps:,}, epochs={epochs:g} of {per_epoch:,} batches")
    if cfg.data.follow_delete and cfg.steps > per_epoch:
        raise UserError(
            f"data.follow_delete: a row is learned once: give at most steps={per_epoch}"
        )
    if cfg.optim.lr is None:
        usual = usual_rate(target.hidden_size, kind.rate_narrows)
        rate = (earlier or {}).get("optim.lr", usual)
        cfg = replace(cfg, optim=replace(cfg.optim, lr=rate))
        why = f"usual for {kind.kind} on a target {target.hidden_size:,} wide"
        notes.append(f"optim.lr: {rate:g}, {why if rate == usual else 'with which this run began'}")
    start = Start(cfg.start, kind.kind, target) if cfg.start else None
    size, ranked, note = draft_vocabulary(cfg.head, counts, start)
    keys = kind.completed(replace(cfg.head, draft_vocab=size), target, counts)
    return Resolved(replace(cfg, head=keys), counts, ranked, start, [*notes, *filter(None, [note])])


def draft_vocabulary(
    keys: HeadConfig, counts: Tensor, start: Start | None = None
) -> tuple[int, Tensor, str]:
    """(size of the draft vocabulary, 0 = all tokens; counts [V] from which a head of these
    keys chooses it; what to say): from those of the data, or that of the head at `start`.
    Raises UserError where another one than the start's is asked for."""
    if start is None:
        size, note = fitting(DRAFT_VOCAB if keys.draft_vocab is None else keys.draft_vocab, counts)
        return size, counts, note
    ids = start.head.ids()
    size = 0 if ids is None else ids.numel()
    if keys.draft_vocab not in (None, size):
        raise UserError(
            f"head.draft_vocab: {keys.draft_vocab} with a start whose head has {size}; leave it "
            "out, which takes the start's"
        )
    if ids is None:
        return 0, counts, ""
    share = vocab.coverage(counts, ids)
    said = f"head.draft_vocab: the start's {size:,} tokens cover {share:.1%} of the supervised ones"
    return size, torch.zeros_like(counts).index_fill_(0, ids.to(counts.device), 1), said


def fitting(size: int, counts: Tensor) -> tuple[int, str]:
    """(a draft vocabulary of `size` lowered to what the data can fill, what to say, "" if
    nothing): with tokens never seen it would only draft slower. A multiple of 64 where
    there are so many, as kernels like it. counts: [V] int64, how often each token is
    supervised.
    """
    seen = int((counts > 0).sum())
    if size <= seen or not seen:
        return size, ""
    fits = seen // 64 * 64 or seen
    return fits, (
        f"head.draft_vocab: {size:,} wanted, but only {seen:,} different tokens are supervised "
        f"in these data: the {fits:,} most frequent are taken"
    )


# What a run says of itself before it starts
# -------------------------------------------------------------------------------------------


def facts_of(
    cfg: TrainConfig, target: Target, plan: BatchPlan, head: Head, world: int
) -> dict[str, Any]:
    """Return the lines of the header: name -> text."""
    rows = plan.rows
    held = int(rows.held.sum())
    supervised = rows.totals.supervised
    facts = {
        "target": f"{target.identity.name if target.identity else 'unnamed'}, {cfg.dtype}, frozen",
        "data": f"{plan.train.numel():,} rows to train on, {held:,} held out, "
        f"{rows.ids.numel():,} tokens, {supervised:,} supervised "
        f"({supervised / rows.ids.numel():.0%}), {len(rows.bad)} rows left out"
        f"{f' ({rows.reasons()})' if rows.bad else ''}"
        + (f", {plan.skipped} skipped as data.skip says" if cfg.data.skip else ""),
        "batches": f"{cfg.batch_size} rows over {world} rank(s), {plan.per_epoch:,} per "
        f"epoch, {cfg.steps:,} steps, {cfg.steps / plan.per_epoch:,.1f} epochs",
    }
    if rows.files:
        facts["files"] = "; ".join(f"{f.name} {f.end - f.first:,} rows" for f in rows.files)
    if message := rows.supervision():
        facts["turns"] = message
        counts, tokenizer = rows.counts(target.vocab_size), target.tokenizer
        ends = {tokenizer.decode([t]): int(counts[t]) for t in target.eos_ids if counts[t]}
        facts["ends of turns"] = (
            ", ".join(f"{end!r} {n:,}" for end, n in ends.items()) + " supervised"
            if ends
            else "WARNING: no end of a turn is supervised: the answers were cut (raise "
            "max_new_tokens), or name it as eos_token_id in the target's generation_config.json"
        )
    passed = sorted((k, n) for k, n in rows.counted.items() if k.startswith(PASSED))
    if passed:
        named = (f"{k.removeprefix(PASSED)} in {n:,} rows" for k, n in passed[:9])
        facts["keys not read"] = ", ".join(named)
    if getattr(head, "coverage", 1.0) < 1:
        facts["draft vocabulary"] = f"covers {head.coverage:.2%} of the supervised tokens"
    return facts


def self_check(rows: JoinedRows, plan: BatchPlan, tokenizer: Any) -> str:
    """Return the supervised text of one row, decoded: what the run will learn, for a human eye."""
    row = int(plan.train[0])
    part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    text = tokenizer.decode(rows.ids[part][rows.loss[part]].tolist())
    shown = text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"
    return f"supervised text of {rows.where(row)}: {shown!r}"


# What a library's error means
# -------------------------------------------------------------------------------------------


def is_peer_gone(error: BaseException) -> bool:
    """Return whether another process of the run no longer answers, in the words of gloo and
    of NCCL."""
    gloo = r"gloo.*(Connection reset by peer|Connection closed by peer|Broken pipe)"
    said = re.search(f"ncclRemoteError|{gloo}", str(error), re.S)
    return isinstance(error, RuntimeError) and said is not None


def explained(error: Exception, world: int, out: str) -> UserError | Interrupted | None:
    """Return an error of a library that is no bug here, as one line for the user; None for any
    other. world: number of processes. out: the run folder."""
    if is_no_memory(error):
        return UserError(
            "micro_tokens: a pass does not fit into memory; give fewer, or micro_batch=1, then a "
            "smaller head.chunk or data.max_length (validate dry_run=true tells what fits); an "
            "evaluation: eval.batch_size=1"
        )
    if "Duplicate GPU detected" in str(error):  # in NCCL's words
        return UserError(
            f"num_processes: two of {world} processes have the same GPU; give one for each GPU"
        )
    said = (
        f"one of {world} processes is gone: what it said is above, or it was killed, often for "
        f"lack of memory; the same command goes on with the last checkpoint of {out}"
    )
    return Interrupted(said, code=1, everywhere=True) if is_peer_gone(error) else None
