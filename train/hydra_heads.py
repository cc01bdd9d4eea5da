"""Train Hydra heads (sequentially dependent Medusa heads, Ankner et al. 2024) on a frozen
target.

    accelerate launch train/hydra_heads.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/hydra_heads steps=N
"""

from __future__ import annotations

import sys
from pathlib import Path

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train import launcher

launcher.set_memory()

from train.config import HydraHeadsRun
from train.job import job

main = job(__name__, "hydra_heads", HydraHeadsRun)

if __name__ == "__main__":
    launcher.run(main)
