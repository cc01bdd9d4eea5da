"""The one place where the configuration of a run is completed: what a command line leaves open
follows from the target, the data and the run that lies in the folder.

A configuration is frozen. Nothing changes one afterwards (tests/conf/test_frozen.py): what the
header prints is what the checkpoints hold and what every later line reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Head, HeadConfig
from outrider.heads.warm import Start
from outrider.train.config import TrainConfig
from outrider.train.schedule import usual_rate

DRAFT_VOCAB = 8192  # where nobody says how many
# Passes over the same rows that taught nearly what as many new rows would, and beyond how many
# a run is told so.
PASSES, MANY = 8, 10


@dataclass(frozen=True)
class Resolved:
    """A run whose every key is settled. counts: [V] int64, how often each token is supervised;
    ranked: the same, such that a fresh head chooses its draft vocabulary from it. start: the head
    that it starts from. notes: what was settled, in lines.
    """

    cfg: TrainConfig
    counts: Tensor
    ranked: Tensor
    start: Start | None
    notes: list[str]

    @property
    def meaning(self) -> dict[str, str]:
        """What of the start decides what is learned, as train.facts.meaning_of has it."""
        return {"start_sha256": self.start.sha256} if self.start else {}

    @property
    def facts(self) -> dict[str, str]:
        """Where the start lies, of one on the hub its commit too, for a run's record."""
        return {"start": self.start.path} if self.start else {}

    @property
    def spent(self) -> dict[str, float]:
        """What the training of the start had taken."""
        return self.start.spent if self.start else {}


def resolve(
    cfg: TrainConfig,
    kind: type[Head],
    target: Target,
    counts: Tensor,
    per_epoch: int,
    earlier: Mapping[str, Any] | None = None,
) -> Resolved:
    """`cfg` with the steps of its epochs, the learning rate of its target's width, and the keys of
    a head of class `kind` as the target, the data and the head at cfg.start settle them.

    counts: [V] int64, how often each token is supervised. per_epoch: batches of an epoch. earlier:
    the meaning of the run that goes on (train.checkpoint), whose learning rate is kept where nobody
    gives another.

    Raises UserError for keys that the target or the data cannot carry, and where cfg.start is
    no head that this one can start from.
    """
    notes = []
    if not cfg.steps:
        cfg = replace(cfg, steps=max(1, round(cfg.epochs * per_epoch)))
        notes.append(f"steps: {cfg.steps:,}, epochs={cfg.epochs:g} of {per_epoch:,} batches")
    if (passes := cfg.steps / per_epoch) > MANY:
        fix = f"epochs={PASSES}" if cfg.epochs else f"steps={PASSES * per_epoch}"
        notes.append(
            f"steps: {cfg.steps:,} are {passes:,.0f} passes over these rows, and nobody tried "
            f"more than {PASSES} (docs/data.md): take more rows, or {fix}, which is {PASSES} "
            "passes"
        )
    if cfg.optim.lr is None:
        rate, note = _rate(cfg, kind, target, earlier or {})
        cfg = replace(cfg, optim=replace(cfg.optim, lr=rate))
        notes.append(note)
    start = Start(cfg.start, kind.kind, target) if cfg.start else None
    size, ranked, note = draft_vocabulary(cfg.head, counts, start)
    keys = kind.completed(replace(cfg.head, draft_vocab=size), target)
    return Resolved(replace(cfg, head=keys), counts, ranked, start, [*notes, *filter(None, [note])])


def _rate(
    cfg: TrainConfig, kind: type[Head], target: Target, earlier: Mapping[str, Any]
) -> tuple[float, str]:
    """(the peak learning rate where nobody gives one, what to say)."""
    rate = usual_rate(target.hidden_size, kind.rate_narrows)
    known = earlier.get("optim.lr", rate)
    if known != rate:
        return known, f"optim.lr: {known}, with which this run began"
    return rate, (
        f"optim.lr: {rate:g}, usual for {kind.kind} on a target {target.hidden_size:,} wide"
    )


# The draft vocabulary
# -------------------------------------------------------------------------------------------


def draft_vocabulary(
    keys: HeadConfig, counts: Tensor, start: Start | None = None
) -> tuple[int, Tensor, str]:
    """(size of the draft vocabulary, 0 = all tokens; counts [V] from which a head of these keys
    chooses it; what to say): from those of the data, or that of the head at `start`. Raises
    UserError where another one than the start's is asked for."""
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
    nothing): with tokens never seen it would only draft slower. A multiple of 64 where there are
    so many, as kernels like it. counts: [V] int64, how often each token is supervised.
    """
    seen = int((counts > 0).sum())
    if size <= seen or not seen:
        return size, ""
    fits = seen // 64 * 64 or seen
    return fits, (
        f"head.draft_vocab: {size:,} wanted, but only {seen:,} different tokens are supervised "
        f"in these data: the {fits:,} most frequent are taken"
    )
