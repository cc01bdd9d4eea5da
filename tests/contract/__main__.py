"""The contract asked of one kind of head, one of an own package too (docs/new-head.md).

python -m tests.contract KIND KEY=VALUE ...
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from outrider.train.validate import head_config
from tests.contract import checks
from tests.contract.cases import Case


def main(words: Sequence[str]) -> None:
    """Raises what the first check that fails raises, and UserError for keys that are no good."""
    kind, *keys = words
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(keys))
    case = Case(head_config({"kind": kind, **given}), ("draft_vocab", -1))
    for check in checks.EVERY:
        check(case)
        print(f"[ok] {check.__name__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for on_disk in checks.ON_DISK:
            on_disk(case, Path(folder, on_disk.__name__))
            print(f"[ok] {on_disk.__name__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
