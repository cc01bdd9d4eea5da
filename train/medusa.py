"""Train Medusa heads on a frozen target.

    accelerate launch train/medusa.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/medusa steps=N

The same command again resumes. Data: chats in JSONL, a `datasets` data set (data=hub), or
plain text (data=text). Exit codes: 0 done, 1 training and decoding disagree (parity gate), 2 a
mistake to mend, 130 stopped by Ctrl-C and 75 by SIGTERM, SIGUSR1 or SIGUSR2 (saved: start it
again). `python` ends with them, `accelerate launch` cannot (train/launcher.py). What happens
at each fault: docs/reliability.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # train/ stands first and would shadow libraries

from conf.schema import entry
from heads import HEADS
from train import launcher
from train.config import MedusaRun
from train.loop import fit


@entry("medusa", MedusaRun)
def main(cfg: MedusaRun) -> None:
    """Run one training job."""
    fit(cfg, HEADS[cfg.head.kind])


if __name__ == "__main__":
    launcher.run(main)
