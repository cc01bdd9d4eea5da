"""The keys of a dry run: those of a training run, and what it would run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from outrider.conf.rules import AboveZero, BelowOne, NotEmpty, NotNegative, OneOrMore, ZeroOrMore
from outrider.train.config import ValidateConfig

DATA = "data.path="  # the keys demand it, a dry run does without


def keyed(words: Sequence[str]) -> list[str]:
    """The words of a command line, with data that are not there where none are named."""
    given = any(word.lstrip("+").startswith(DATA) for word in words)
    return [*words, *([] if given else [DATA + "not-there"])]


@dataclass(frozen=True)
class DryRunConfig(ValidateConfig):
    """Keys of scripts/validate.py dry_run=true: those of a run of any kind of head, and"""

    # count the run on fake tensors from the target's config alone: no weights, no data, no GPU
    dry_run: bool = True
    # how many GPUs
    gpus: OneOrMore = 8
    # which, and its memory: h100-80gb, h200-141gb, b200-180gb, a100-80gb, a100-40gb, l40s-48gb,
    # rtx4090-24gb, cpu-16gb; or a JSON file with a device that was measured (name, memory, flops,
    # bandwidth, link, launch: bytes, a second, seconds)
    gpu: str = "h100-80gb"
    # rows of the training data; this and the next three are assumed where data.path is not there,
    # else read from it, by the target's tokenizer
    rows: OneOrMore = 500_000
    # tokens of a row on average: lengths are log-normal, cut at data.max_length
    row_tokens: OneOrMore = 800
    # their spread: standard deviation of the logarithm of a length; 0 = all are alike
    row_sigma: NotNegative = 0.9
    # share of the tokens that is supervised
    supervised: Annotated[float, Interval(gt=0, le=1)] = 0.8
    # answers that a server still has to write for these data; null = one for each row, none where
    # data.path is there
    answers: ZeroOrMore | None = None
    # answers under way at a time (scripts/synthesize.py backend=openai concurrency=N), assumed
    concurrency: OneOrMore = 256
    # tokens that the server writes in a second of each of them, assumed
    answer_speed: AboveZero = 60.0
    # share of the GPU's memory that must stay free
    margin: BelowOne = 0.0
    # JSON file with the result
    out: NotEmpty = "reports/dry-run.json"

    def absent(self) -> list[str]:
        """Nothing: a dry run needs no file."""
        return []

    def auto(self) -> dict[str, str]:
        """Of GPUs that are not here."""
        return {"dtype": "bfloat16"}
