"""Train an EAGLE head (EAGLE-3, EAGLE-1, HASS) on a frozen target.

    accelerate launch train/eagle.py target=smollm2 head=eagle3 data=jsonl data.path=FILE \\
        out_dir=runs/eagle3 steps=N
"""

from __future__ import annotations

import sys
from pathlib import Path

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train import launcher

launcher.set_memory()

from train.config import EagleRun
from train.job import job

main = job(__name__, "eagle", EagleRun)

if __name__ == "__main__":
    launcher.run(main)
