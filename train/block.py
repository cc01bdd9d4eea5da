"""Train a block head (DFlash, its causal kind, DSpark) on a frozen target.

    accelerate launch train/block.py target=smollm2 head=dflash data=jsonl data.path=FILE \\
        out_dir=runs/dflash steps=N
"""

from __future__ import annotations

import sys
from pathlib import Path

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train import launcher

launcher.set_memory()

from train.config import BlockRun
from train.job import job

main = job(__name__, "block", BlockRun)

if __name__ == "__main__":
    launcher.run(main)
