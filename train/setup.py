"""Before the first step: target, data, head, optimizer, and what lies in the run folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from outrider.decode.models.load import load_target
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head
from outrider.heads.batch import hash_u63
from outrider.train.config import TrainConfig
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.load import load_rows
from outrider.train.facts import facts_of, meaning_of, self_check
from outrider.train.features.store import Source
from outrider.train.flops import Flops
from outrider.train.lock import Lock
from outrider.train.log import Log
from outrider.train.metrics import Clock
from outrider.train.profiling import Window
from outrider.train.resolve import Resolved, resolve
from outrider.train.run import Run
from outrider.train.saving import Saver, check_space, last_state, resume
from outrider.train.sharding import loaded, shard_target
from outrider.train.signals import Stop, interruption
from outrider.train.waiting import main_first, meet, nothing

CheckStop = Callable[[], None]


def begin(
    cfg: TrainConfig,
    kind: type[Head],
    accelerator: Accelerator,
    stop: Stop,
    lock: Lock | None,
    given: tuple[Target, JoinedRows] | None = None,
) -> Run:
    """Load target and data, make the head, resume what lies in the run folder, say what
    follows. given: target and rows in place of those that the keys name, for a
    measurement."""
    out, main, world = Path(cfg.out_dir), accelerator.is_main_process, accelerator.num_processes
    target, sharding = (given[0], "") if given else loaded(cfg, accelerator.device)
    check_stop = functools.partial(_check, stop)
    rows = _texts(cfg, target, main, check_stop) if given is None else given[1]
    plan = BatchPlan(rows, cfg.batch_size, cfg.data.window, cfg.seed, cfg.data.skip)

    checkpoint, state, notes = last_state(out, accelerator)
    counts = rows.counts(target.vocab_size)
    made = resolve(cfg, kind, target, counts, plan.per_epoch, state.meaning)
    cfg = made.cfg
    head, begun = first_head(made, kind, target)
    if cfg.shard_target and not target.sharded:
        sharding = shard_target(cfg, target, accelerator.device)
    head.to(accelerator.device)
    optimizer = _optimizer(cfg, head)

    source = _source(cfg, head, target, rows)
    meaning = {**meaning_of(cfg, target, rows), **source.meaning, **made.meaning}
    notes += resume(checkpoint, state, cfg, meaning, head, optimizer)
    check_space(cfg, head, state.step, accelerator)
    state.meaning = meaning
    state.came_from(made.spent)

    log = Log(cfg, main, state)
    _say(log, notes)
    log.header(head, facts_of(cfg, target, rows, plan, head, world) | made.facts)
    learned = self_check(rows, plan, target.tokenizer)
    _say(log, (learned, *made.notes, *begun, sharding, source.note))
    clock = Clock(accelerator.device)
    clock.watch(target)
    head.train()
    return Run(
        cfg,
        accelerator,
        stop,
        target,
        rows,
        plan,
        head,
        _called(accelerator, head),
        source,
        optimizer,
        state,
        log,
        Saver(cfg, accelerator, lock, log, state.step or -1),
        clock,
        Flops(cfg.dtype, accelerator.device, log.say),
        Window(cfg.profile, out, main, log.say),
    )


def _check(stop: Stop) -> None:
    """Raises Interrupted where the run was asked to stop before its first step."""
    if stop.requested:
        raise interruption(stop.requested, 0, False)


def _say(log: Log, notes: Iterable[str]) -> None:
    for note in filter(None, notes):
        log.say(note)


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


def prepared(cfg: TrainConfig) -> tuple[Target, BatchPlan]:
    """(target, the rows that it would train on in their order) of a run in this process
    alone."""
    target = load_target(cfg.target, cfg.dtype, cfg.device or None)
    rows = _rows(cfg, target)
    return target, BatchPlan(rows, cfg.batch_size, cfg.data.window, cfg.seed, cfg.data.skip)


def _called(accelerator: Accelerator, head: Head) -> nn.Module:
    """The head as it is called: in DDP on several ranks."""
    if accelerator.num_processes == 1:
        return head
    model: nn.Module = accelerator.prepare(head)
    # No buffer changes while a head learns. As an argument it has another name in each of two
    # generations of torch, and Accelerate hands on the one that is deprecated.
    model.broadcast_buffers = False  # type: ignore[assignment]
    return model


def _rows(cfg: TrainConfig, target: Target, check_stop: CheckStop = nothing) -> JoinedRows:
    size = target.vocab_size, target.context_length
    return load_rows(cfg.data, target.tokenizer, target.eos_ids, *size, check_stop)


def _texts(cfg: TrainConfig, target: Target, main: bool, check_stop: CheckStop) -> JoinedRows:
    """The rows of tokens; on rank 0 (main) those left out are listed in the run folder.
    check_stop: raises where the run was asked to stop."""
    wait = cfg.data.wait, check_stop
    with main_first("rows", *wait) if cfg.data.cache else nullcontext():
        rows = _rows(cfg, target, check_stop)
    meet("rows", *wait)  # in the first collective nobody may wait for tokens
    if main:
        rows.list_bad(Path(cfg.out_dir))
    return rows


def _optimizer(cfg: TrainConfig, head: Head) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad],
        lr=cfg.optim.lr or 0.0,  # of every step: train.schedule
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
        fused=True,
    )


def _source(cfg: TrainConfig, head: Head, target: Target, rows: JoinedRows) -> Source:
    """What the head's forward gets as its target: the target, or features on disk."""
    if cfg.data.packing:
        target.packs()  # remembered; the ranks of a sharded target must ask it together
    return Source(cfg, head, target, rows)
