"""The keys of scripts/doctor.py first_gpu."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from outrider.conf.rules import Device, NotEmpty, OneOrMore, Seed
from outrider.decode.models.config import AutoDtype


@dataclass(frozen=True)
class FirstConfig(AutoDtype):
    """Keys of scripts/doctor.py first_gpu."""

    # cpu, cuda or cuda:N; empty = what is there
    device: Device = ""
    # dtype of the target and of the matmuls
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    # further keys of train/eagle.py
    keys: list[str] = field(default_factory=list)
    # steps of training
    steps: Annotated[int, Ge(4)] = 20
    # prompts that are decoded
    prompts: OneOrMore = 8
    # tokens of an answer
    max_new_tokens: OneOrMore = 64
    # folder for data and run; what lies there from before is replaced
    work: NotEmpty = "runs/first_gpu"
    # JSON file with the result
    out: NotEmpty = "docs/results/first_gpu.json"
    # of data, training and prompts
    seed: Seed = 0

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = []
        taken = ("out_dir", "steps", "device", "dtype", "seed", "profile")
        for text in self.keys:
            name = text.partition("=")[0].lstrip("+")
            if "=" not in text or name in taken:
                found.append(f"keys: {text!r}; give KEY=VALUE of train/eagle.py, none of {taken}")
        return found
