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
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.extra import extra
from outrider.scripts.machine import look
from outrider.scripts.machine.config import DoctorConfig


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["first_gpu"]:
        extra("first_gpu", "first_gpu").main(sys.argv[2:])
    main()
