"""What stands in the way of training on this machine: versions, torch's build, GPUs, attention
kernels and which of them a run takes, memory and disk, accelerate's config and what a run makes
of it, caches.

    outrider doctor

One line for each problem, and exit code 1 if there is any. Nothing is loaded or downloaded;
out=FILE.json keeps the findings.

    outrider doctor gpu=true

A few minutes on a GPU: steps of training and answers of one row, with random weights in the shape
of a published model (`model`), so that nothing is downloaded; tokens/s, what share that is of what
the GPU's own products reach, and what the dry run predicts beside it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.machine import look
from outrider.scripts.machine.config import DoctorConfig


@entry("doctor", DoctorConfig)
def main(cfg: DoctorConfig) -> int:
    """Look, say what was found, and count the problems."""
    if cfg.out:
        files.check_out(Path(cfg.out))
    if cfg.gpu:
        from outrider.scripts.machine import (
            gpu,
        )  # training and decoding, which all else does without

        return gpu.main(cfg, look.usable(cfg.device))
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
    main()
