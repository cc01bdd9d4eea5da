"""What stands in the way of training on this machine: versions, torch's build, GPUs, attention
kernels and which of them a run takes, memory and disk, accelerate's config and what a run makes
of it, caches.

    python scripts/doctor.py

One line for each problem, and exit code 1 if there is any. Nothing is loaded or downloaded;
out=FILE.json keeps the findings.

    python scripts/doctor.py first_gpu

About ten minutes on a GPU that has not run this yet: the kernels beside plain operations in
float64, 20 steps of training with a profiler's trace, their peak memory beside what was
predicted, greedy decoding beside float32; OUT (JSON) says what is confirmed by that. The target
has random weights and the shape of a 1B model, so nothing is downloaded; `keys` takes those of
train/eagle.py, such as 'keys=["experiment=llama31_8b_eagle3","data.path=FILE"]'. device=cpu goes
through the same steps with a tiny target, in well under a minute.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from annotated_types import Ge

from conf.rules import Device, NotEmpty, OneOrMore, Seed
from conf.schema import entry
from scripts.common import files
from scripts.extra import first_gpu
from scripts.machine import look


@dataclass
class DoctorConfig:
    """Keys of scripts/doctor.py."""

    # cpu, cuda or cuda:N that runs would use; empty = what is there
    device: Device = ""
    # dtype that runs would use
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    # folder where runs would lie
    out_dir: str = "runs"
    # JSON file with the findings; empty = none
    out: str = ""


@dataclass
class FirstConfig:
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


@entry("doctor", DoctorConfig)
def main(cfg: DoctorConfig) -> int:
    """Look, say what was found, and count the problems."""
    if cfg.out:
        files.check_out(Path(cfg.out))
    device = cfg.device or look.usable("")
    if device.startswith("cuda") and not look.there(device):
        parts = look.report(iter([look.versions(), look.build(device, cfg.dtype)]))
    else:
        parts = look.report(look.all_parts(device, cfg.dtype, Path(cfg.out_dir)))
    problems = [line for part in parts for line in part.problems]
    if cfg.out:
        about = {"command": files.command(), "environment": files.environment()}
        files.write_json(Path(cfg.out), {**about, "parts": [asdict(part) for part in parts]})
    print(f"{len(problems)} problem(s)" if problems else "no problem found", flush=True)
    return 1 if problems else 0


@entry("first_gpu", FirstConfig)
def first(cfg: FirstConfig) -> int:
    """Run the steps; one that fails does not stop the others."""
    return first_gpu.run(cfg)


PARTS = {"first_gpu": first}

if __name__ == "__main__":
    part = PARTS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if part is None:
        main()
    else:
        part(sys.argv[2:])
