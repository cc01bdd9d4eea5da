"""Before the first step: target, data, head, optimizer, and what lies in the run folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from decode.target import Target
from heads.base import Head
from train.clock import Clock
from train.config import TrainConfig
from train.facts import facts_of, meaning_of, self_check, settle
from train.first import first_head
from train.lock import Lock
from train.log import Log
from train.measure.profile import Window
from train.measure.speed import Flops
from train.run import Run
from train.saving import Saver, resumed
from train.sharding import loaded, shard_target
from train.signals import Stop, interruption
from train.stored.features import Source
from train.texts.batches import Plan, Rows, load_rows
from train.waiting import meet, turn

Heed = Callable[[], None]


def begin(
    cfg: TrainConfig, kind: type[Head], accelerator: Accelerator, stop: Stop, lock: Lock | None
) -> Run:
    """Load target and data, make the head, resume what lies in the run folder, and say what
    will be done.
    """
    out, main, world = Path(cfg.out_dir), accelerator.is_main_process, accelerator.num_processes
    target, sharding = loaded(cfg, kind, accelerator.device)

    def heed() -> None:
        if stop.asked:
            raise interruption(stop.asked, 0, False)

    rows = _texts(cfg, target, heed)
    if main:
        rows.list_bad(out)
    plan = Plan(rows, cfg.batch_size, cfg.data.window, cfg.seed, cfg.data.skip)

    kept = ("optim.lr",) if cfg.optim.lr is None else ()
    settled = settle(cfg, cfg.head, target, plan)
    head, begun = first_head(cfg, kind, target, rows.counts(target.vocab_size))
    if cfg.shard_target and not target.sharded:
        sharding = shard_target(cfg, target, accelerator.device)
    head.to(accelerator.device)
    optimizer = _optimizer(cfg, head)

    source = _source(cfg, head, target, rows, heed)
    meaning = {**meaning_of(cfg, target, rows), **source.meaning, **begun.meaning}
    state, notes = resumed(cfg, head, optimizer, meaning, accelerator, kept)
    cfg.optim.lr = meaning["optim.lr"]
    state.came_from(begun.spent)

    log = Log(cfg, main, state)
    for note in notes:
        log.say(note)
    log.header(head, facts_of(cfg, target, rows, plan, head, world))
    log.say(self_check(rows, plan, target.tokenizer))
    for note in filter(None, (*settled, *begun.notes, sharding, source.note)):
        log.say(note)
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
        Saver(cfg, accelerator, lock, log, stop, state.step or -1),
        clock,
        Flops(cfg.dtype, accelerator.device, log.say),
        Window(cfg.profile, out, main, log.say),
    )


def _called(accelerator: Accelerator, head: Head) -> nn.Module:
    """The head as it is called: in DDP on several ranks."""
    if accelerator.num_processes == 1:
        return head
    model: nn.Module = accelerator.prepare(head)
    # No buffer changes while a head learns. As an argument it has another name in each of two
    # generations of torch, and Accelerate hands on the one that is deprecated.
    model.broadcast_buffers = False  # type: ignore[assignment]
    return model


def _texts(cfg: TrainConfig, target: Target, heed: Heed) -> Rows:
    """The rows of tokens. heed: raises where the run was asked to stop."""
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length, heed
    )
    meet("rows", cfg.data.wait, heed)  # in the first collective nobody may wait for tokens
    return rows


def _optimizer(cfg: TrainConfig, head: Head) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        head.parameter_groups(),
        lr=cfg.optim.lr or 0.0,  # of every step: train.schedule
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
        fused=True,
    )


def _source(cfg: TrainConfig, head: Head, target: Target, rows: Rows, heed: Heed) -> Source:
    """What the head's forward gets as its target: the target, or features on disk."""
    if cfg.data.packing:
        target.packs()  # remembered; the ranks of a sharded target must ask it together
    # Files that this machine has not read yet are hashed once; the others find it in the cache.
    with turn("features", cfg.data.wait, heed) if cfg.data.features else nullcontext():
        source = Source(cfg, head, target, rows)
    meet("features", cfg.data.wait, heed)
    return source
