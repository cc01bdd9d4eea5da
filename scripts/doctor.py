"""Say what prevents training on this machine: versions, torch's build, GPUs, the attention
kernel that a run takes, memory and disk.

    outrider doctor

One line for each problem, and exit code 1 if there is any. Nothing is loaded or downloaded.

    outrider doctor gpu=true

At most 8 minutes on a GPU: steps of training and answers of one row, with random weights in the
shapes of published models (`shape`), so that nothing is downloaded; tokens/s, the share of what a
product reaches here, where the time goes, what compiled layers bring, and what the dry run
predicts. out=FILE.json keeps it as it goes.
"""

from __future__ import annotations

from pathlib import Path

from outrider.conf.schema import entry
from outrider.scripts.machine import look
from outrider.scripts.machine.config import DoctorConfig


@entry("doctor", DoctorConfig)
def main(cfg: DoctorConfig) -> int:
    """Look, say what was found, and count the problems."""
    device = look.usable(cfg.device)
    if cfg.gpu:
        from outrider.scripts.machine import gpu  # training, which all else does without

        return gpu.main(cfg, device)
    problems = look.look(device, cfg.dtype, Path(cfg.out_dir))
    print(f"{len(problems)} problem(s)" if problems else "no problem found", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    main()
