"""Check a training run before spending on it: becomes train/validate.py on the same arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    file = str(Path(__file__).resolve().parents[1] / "train" / "validate.py")
    os.execv(sys.executable, [sys.executable, file, *sys.argv[1:]])
