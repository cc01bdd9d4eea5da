"""The keys of scripts/doctor.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.conf.rules import AboveZero, Device, OneOrMore
from outrider.decode.models.config import AutoDtype


@dataclass(frozen=True)
class DoctorConfig(AutoDtype):
    """Keys of scripts/doctor.py."""

    # cpu, cuda or cuda:N that runs would use; empty = what is there
    device: Device = ""
    # dtype that runs would use; auto is theirs too
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "bfloat16"
    # folder where runs would lie
    out_dir: str = "runs"
    # of gpu=true: JSON file with the figures; empty = none
    out: str = ""
    # measure training and decoding on this GPU instead of looking at the machine
    gpu: bool = False
    # of gpu=true: qwen3-8b, llama-3.2-1b, qwen3-8b-dflash or smollm2; empty = all, in this order
    shape: str = ""
    # of gpu=true: no further shape is begun after so many minutes
    minutes: AboveZero = 6.0
    # of gpu=true: steps of training that are timed
    steps: OneOrMore = 10
