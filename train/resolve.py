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
from outrider.heads import vocab, words
from outrider.heads.base import Head, HeadConfig
from outrider.heads.given import vocabulary_in
from outrider.heads.lora import LoraKeys
from outrider.heads.warm import MAKE, Start
from outrider.train.config import TrainConfig, flat
from outrider.train.schedule import usual_rate

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
    the meaning of the run that goes on (train.state), whose learning rate is kept where nobody
    gives another.

    Raises UserError for keys that the target or the data cannot carry, and where cfg.start is
    no head that this one can start from.
    """
    notes = []
    if not cfg.steps:
        cfg = replace(cfg, steps=max(1, round(cfg.epochs * per_epoch)))
        notes.append(f"steps: {cfg.steps:,}, epochs={cfg.epochs:g} of {per_epoch:,} batches")
    if cfg.optim.lr is None:
        rate, note = _rate(cfg, kind, target, earlier or {})
        cfg = replace(cfg, optim=replace(cfg.optim, lr=rate))
        notes.append(note)
    _check_start(cfg, kind)
    start = Start(cfg.start, kind.kind, target) if cfg.start else None
    if start is not None and adapts(cfg, kind):
        keys, note = _frozen_keys(cfg.head, start.head.cfg)
        ranked = counts
    else:
        size, ranked, note = draft_vocabulary(cfg.head, counts, start)
        keys = kind.completed(replace(cfg.head, draft_vocab=size), target)
    return Resolved(replace(cfg, head=keys), counts, ranked, start, [*notes, *filter(None, [note])])


def adapts(cfg: TrainConfig, kind: type[Head]) -> bool:
    """Whether a LoRA learns on a frozen head, not weights of the head's own."""
    return bool(cfg.head.lora.rank) and not kind.own_lora


def whole(cfg: TrainConfig, kind: type[Head]) -> TrainConfig:
    """The same run of a fresh head of which every weight learns, as checks and measurements take
    it."""
    keys = cfg.head if kind.own_lora else replace(cfg.head, lora=LoraKeys())
    return replace(cfg, start="", head=keys)


def _rate(
    cfg: TrainConfig, kind: type[Head], target: Target, earlier: Mapping[str, Any]
) -> tuple[float, str]:
    """(the peak learning rate where nobody gives one, what to say)."""
    beside = adapts(cfg, kind)
    rate = usual_rate(target.hidden_size, kind.rate_narrows) * (LORA_RATE if beside else 1)
    known = earlier.get("optim.lr", rate)
    if known != rate:
        return known, f"optim.lr: {known}, with which this run began"
    return rate, (
        f"optim.lr: {rate:g}, usual for {'a LoRA on ' if beside else ''}{kind.kind} on a target "
        f"{target.hidden_size:,} wide"
    )


def _check_start(cfg: TrainConfig, kind: type[Head]) -> None:
    """Raises UserError for a LoRA and a start that do not go together."""
    rank = cfg.head.lora.rank
    if rank and kind.own_lora and cfg.start:
        raise UserError(
            "start: a LoRA learns beside frozen weights that are the target's own; set "
            "head.lora.rank=0, or put it on a draft by head.path=FOLDER/head"
        )
    if not adapts(cfg, kind):
        return
    if not cfg.start:
        raise UserError(
            f"head.lora.rank: {rank} learns on a head that stays frozen; name it by "
            "start=FOLDER, or set head.lora.rank=0"
        )


def _frozen_keys(keys: HeadConfig, frozen: HeadConfig) -> tuple[HeadConfig, str]:
    """(the keys of a LoRA on a frozen head, which are that head's own since no weight of it moves;
    what to say of others that were given)."""
    given, has = flat(keys), flat(frozen)
    left = {k for k in (*MAKE, "draft_vocab") if given.get(k) is None}
    others = [k for k in has if given[k] != has[k] and not k.startswith("lora.") and k not in left]
    note = f"as the frozen head has them: {', '.join(f'head.{k}' for k in others)}"
    return replace(frozen, lora=keys.lora), note if others else ""


# The draft vocabulary
# -------------------------------------------------------------------------------------------


def draft_vocabulary(
    keys: HeadConfig, counts: Tensor, start: Start | None = None
) -> tuple[int, Tensor, str]:
    """(size of the draft vocabulary, 0 = all tokens; counts [V] from which a head of these keys
    chooses it; what to say): from those of the data, with the tokens of a `start` behind them; or
    the one of head.draft_vocab_from, or the start's, as large as it is. Raises UserError for one
    that is none of this target."""
    if folder := keys.draft_vocab_from:
        ids = vocabulary_in(folder, counts.numel())
        note = (
            f"head.draft_vocab: the {ids.numel():,} tokens of {folder}, "
            f"{int((counts[ids] > 0).sum()):,} of them supervised in these data"
        )
    elif keys.draft_vocab is None and start is not None and start.head.ids() is not None:
        ids, note = kept_vocabulary(words.ids_of(start.head), counts)
    else:
        size = keys.draft_vocab
        if size is None:
            size = DRAFT_VOCAB if start is None else 0
        ranked = counts if start is None else start.counts(counts)
        size, note = fitting(size, ranked)
        return size, ranked, note
    ranked = torch.zeros_like(counts).index_fill_(0, ids.to(counts.device), 1)
    return ids.numel(), ranked, note


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


def kept_vocabulary(ids: Tensor, counts: Tensor) -> tuple[Tensor, str]:
    """(the draft vocabulary of a head that starts from one with tokens `ids` [Vd], ascending, what
    to say): the same, unless it covers less than COVERED of these data; then also the tokens that
    a fresh one of its size would have. counts: [V] int64, how often each is supervised."""
    size, share = ids.numel(), vocab.coverage(counts, ids)
    said = f"head.draft_vocab: the start's {size:,} tokens cover {share:.1%} of the supervised ones"
    if share >= COVERED or not counts.any():
        return ids, said
    ranks = torch.where(torch.isin(torch.arange(counts.numel()), ids), 0, counts.cpu())
    few = vocab.choose(counts, min(size, int((counts > 0).sum())))
    new = few[ranks[few] > 0]
    new = new[ranks[new].argsort(descending=True, stable=True)]
    # A multiple of 64 tokens in all, as kernels like it.
    new = new[: new.numel() - (size + new.numel()) % 64] if new.numel() >= 64 else new
    ids = torch.cat([ids, new]).sort().values
    return ids, (
        f"{said}, less than {COVERED:.0%}: {new.numel():,} more of these data, "
        f"{vocab.coverage(counts, ids):.1%}"
    )
