"""The head that a run begins with: a fresh one, one that starts from another's weights, or a
LoRA on a frozen one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from decode.target import Target
from heads import vocab
from heads.base import Head
from heads.batch import hash_u63
from heads.lora import Base
from heads.warm import MAKE, Start
from heads.words import difference, ids_of, ranked, with_words
from train.config import TrainConfig, flat
from train.facts import settle_vocabulary


@dataclass(frozen=True)
class Begun:
    """How a run's head began. notes: lines to tell. meaning: what of it decides what is
    learned, as facts.meaning_of has it. spent: what the head that it started from had taken."""

    notes: list[str]
    meaning: dict[str, str]
    spent: dict[str, float] = field(default_factory=dict)


def first_head(
    cfg: TrainConfig, kind: type[Head], target: Target, counts: Tensor
) -> tuple[Head, Begun]:
    """The head of class `kind` before its first step. counts: [V] int64, how often each token
    is supervised.

    Raises UserError for keys that the target or the data cannot carry, and where cfg.start is
    no head that this one can start from.
    """
    lora = cfg.head.lora
    if lora.rank and not kind.own_lora:
        return _adapted(cfg, kind, target, counts)
    torch.manual_seed(hash_u63(cfg.seed, "head"))
    if cfg.start and lora.rank:
        raise UserError(
            "start: a LoRA learns beside frozen weights that are the target's own; set "
            "head.lora.rank=0, or put it on a draft by head.path=FOLDER/head"
        )
    start = Start(cfg.start, kind.kind, target) if cfg.start else None
    known, note = settle_vocabulary(cfg.head, counts, start)
    notes = [note]
    head = kind.for_target(target, cfg.head, known)
    cfg.head = head.cfg  # with what the target has left open
    if cfg.dtype == "float64":
        head.double()
    ids = head.ids()
    if ids is not None:
        head.coverage = vocab.coverage(counts, ids)
    if start is None:
        return head, Begun(notes, {})
    notes.append(start.give(head))
    return head, Begun(notes, {"start_sha256": start.sha256}, start.spent)


def _adapted(
    cfg: TrainConfig, kind: type[Head], target: Target, counts: Tensor
) -> tuple[Head, Begun]:
    """The head at cfg.start, frozen, with a fresh LoRA on it. Its own keys hold, since no weight
    of it moves; they are put into `cfg`."""
    keys = cfg.head.lora
    if not cfg.start:
        raise UserError(
            f"head.lora.rank: {keys.rank} learns on a head that stays frozen; name it by "
            "start=FOLDER, or set head.lora.rank=0"
        )
    if kind.trains_target:
        raise UserError(
            f"head.lora.rank: {kind.kind} moves the target, not the head alone; set "
            "head.lora.rank=0 and use head.tune.rank"
        )
    start = Start(cfg.start, kind.kind, target)
    head, folder = start.head, Path(start.folder).resolve()
    if cfg.dtype == "float64":
        head.double()
    new, gone = _exchange_words(head, target, counts) if keys.words else ([], [])
    torch.manual_seed(hash_u63(cfg.seed, "head"))
    count = head.adapt(keys, Base(str(folder), start.sha256, new, gone))
    asked, has = (flat(one) for one in (cfg.head, head.cfg))
    left = {k for k in (*MAKE, "draft_vocab") if asked.get(k) is None}
    others = [k for k in has if asked[k] != has[k] and not k.startswith("lora.") and k not in left]
    cfg.head = head.cfg = replace(head.cfg, lora=keys)
    ids = head.ids()
    if ids is not None:
        head.coverage = vocab.coverage(counts, ids)
    learns = sum(p.numel() for p in head.parameters() if p.requires_grad)
    total = sum(p.numel() for p in head.parameters()) - learns
    told = f"a LoRA of rank {keys.rank} on {count} layers of {cfg.start}: {learns:,} numbers"
    notes = [f"{told} learn, {total:,} stay as they are"]
    if new:
        notes.append(
            f"{len(new):,} of {ids_of(head).numel():,} draft tokens are new, in place of ones that "
            "these data lack"
        )
    if others:
        notes.append(f"as the frozen head has them: {', '.join(f'head.{k}' for k in others)}")
    return head, Begun(notes, {"start_sha256": start.sha256}, start.spent)


def _exchange_words(head: Head, target: Target, counts: Tensor) -> tuple[list[int], list[int]]:
    """Let the frozen `head` draft the tokens of these data: (those that are new, those that gave
    way). counts: [V] int64. Raises UserError where no fresh head like it gives them rows."""
    old = head.ids()
    if old is None:
        return [], []
    ids = vocab.choose(ranked(counts, old), old.numel())
    try:
        with_words(head, ids, target)
    except UserError as error:
        raise UserError(f"{error}; or leave its draft tokens: head.lora.words=false") from None
    return difference(old, ids)
