"""The keys of Medusa-2 alone (heads/parallel/medusa2.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.conf.rules import AboveZero, BelowOne, NotNegative, Share
from outrider.heads.limits import Count, CountOrZero


@dataclass(frozen=True)
class TargetLoraConfig:
    """Medusa-2: a LoRA on the target, trained with the heads (heads/parallel/medusa2.py)."""

    # rank of the LoRA; 0 = no Medusa-2 (the paper: 32)
    rank: CountOrZero = 0
    # its output counts alpha / rank
    alpha: Count = 16
    # dropout in front of it
    dropout: BelowOne = 0.05
    # names of the layers that get one; empty = every linear layer but the LM head
    targets: list[str] = field(default_factory=list)
    # learning rate of the heads, in times of the run's (which is the adapter's)
    head_lr: AboveZero = 4.0
    # weight of the heads' loss beside the self-distillation
    head_weight: NotNegative = 0.2
    # share of the steps in which this weight rises from 0
    ramp: Share = 0.1
    # weight of the self-distillation, KL to the target without adapter
    distil: NotNegative = 1.0
