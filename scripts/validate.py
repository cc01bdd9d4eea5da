"""Check a training run before spending on it.

    python scripts/validate.py experiment=NAME data.path=FILE
    python scripts/validate.py target=smollm2 head=eagle3 data.path=FILE steps=1000
    python scripts/validate.py dry_run=true experiment=NAME gpus=8 gpu=h100-80gb

Configuration; loss mask with decoded text; which parameters get gradient; memory, time, bytes
and FLOPs of the run; a head trained on one sample, decoded through the real engine. Exit code 0:
all passed; 1: a check failed; 2: a mistake to mend. Takes the keys of the training scripts (--help
lists them); the work is done by train/validate.py, which takes this process over: signals and exit
code are its own. With dry_run=true nothing is loaded or run: memory by part and hours on GPUs that
are not here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Become train/validate.py on the same arguments."""
    file = str(ROOT / "train" / "validate.py")
    os.execv(sys.executable, [sys.executable, file, *sys.argv[1:]])


if __name__ == "__main__":
    main()
