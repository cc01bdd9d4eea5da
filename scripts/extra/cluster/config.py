"""The keys of a dry run: those of a training run, and what it would run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from conf.rules import BelowOne, NotEmpty, OneOrMore
from train.validate import ValidateConfig


@dataclass(frozen=True)
class DryRunConfig(ValidateConfig):
    """Keys of scripts/validate.py dry_run=true: those of a run of any kind of head, and"""

    # count the run on fake tensors from the target's config alone: no weights, no data, no GPU
    dry_run: bool = True
    # how many GPUs
    gpus: OneOrMore = 8
    # which, and its memory: h100-80gb, h200-141gb, b200-180gb, a100-80gb, a100-40gb, l40s-48gb,
    # rtx4090-24gb, cpu-16gb
    gpu: str = "h100-80gb"
    # conversations of the training data, assumed
    rows: OneOrMore = 500_000
    # tokens of a conversation on average, assumed (at most data.max_length)
    row_tokens: OneOrMore = 800
    # share of the tokens that is supervised, assumed
    supervised: Annotated[float, Interval(gt=0, le=1)] = 0.8
    # share of the GPU's memory that must stay free
    margin: BelowOne = 0.0
    # JSON file with the result
    out: NotEmpty = "reports/dry-run.json"
