"""The keys of scripts/doctor.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.conf.rules import Device
from outrider.decode.models.config import AutoDtype


@dataclass(frozen=True)
class DoctorConfig(AutoDtype):
    """Keys of scripts/doctor.py."""

    # cpu, cuda or cuda:N that runs would use; empty = what is there
    device: Device = ""
    # dtype that runs would use; auto is theirs too
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    # folder where runs would lie
    out_dir: str = "runs"
    # JSON file with the findings; empty = none
    out: str = ""
