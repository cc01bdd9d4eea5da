"""Train Medusa heads on a frozen target.

    accelerate launch train/medusa.py target=smollm2 data=jsonl data.path=FILE \\
        out_dir=runs/medusa steps=N
"""

from __future__ import annotations

import sys
from pathlib import Path

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train import launcher

launcher.set_memory()

from train.config import MedusaRun
from train.job import job

main = job(__name__, "medusa", MedusaRun)

if __name__ == "__main__":
    launcher.run(main)
