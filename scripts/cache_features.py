"""Write the target's features of a data set once; training with data.features=FOLDER then runs
no target.

    accelerate launch scripts/cache_features.py target=smollm2 data.path=FILE \\
        out=runs/features heads=[eagle3]

Bytes and free space are told before anything is written; any number of processes share the
work; the same command resumes, and mends damaged files. `--help` lists the keys. The work is
done by train/cache_features.py, which takes this process over: signals and exit code are its
own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    os.execv(
        sys.executable, [sys.executable, str(ROOT / "train" / "cache_features.py"), *sys.argv[1:]]
    )
