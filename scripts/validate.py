"""Check a training run before spending on it.

    python scripts/validate.py experiment=NAME data.path=FILE
    python scripts/validate.py target=smollm2 head=eagle3 data.path=FILE steps=1000

Configuration; loss mask with decoded text; which parameters get gradient; memory, time, bytes
and FLOPs of the run; an oracle that shows a shift by one; a head trained on one sample,
decoded through the real engine. Exit code 0: all passed; 1: a check failed; 2: a mistake to
mend. Takes the keys of the training scripts (--help lists them); the work is done by
train/validate.py, which takes this process over, because scripts and training do not import
each other.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Become train/validate.py on the same arguments: its signals and exit code are this
    process's.
    """
    os.execv(sys.executable, [sys.executable, str(ROOT / "train" / "validate.py"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
