"""Train a separate small draft model for a frozen target, cut from it or started from a
smaller relative.

    accelerate launch train/draft.py target=smollm2 head=small_lm head.from_target_layers=6 \\
        data=jsonl data.path=FILE out_dir=runs/draft steps=N

OUT/head is an ordinary transformers folder: `AutoModelForCausalLM.from_pretrained` and
`assistant_model=` take it.
"""

from __future__ import annotations

import sys
from pathlib import Path

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train import launcher

launcher.set_memory()

from train.config import DraftRun
from train.job import job

main = job(__name__, "draft", DraftRun)

if __name__ == "__main__":
    launcher.run(main)
