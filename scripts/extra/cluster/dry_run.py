"""A whole training run on a laptop, without weights or GPU: what it will take on a cluster.

    python scripts/validate.py dry_run=true experiment=llama31_8b_eagle3 gpus=8 gpu=h100-80gb

Counted on fake tensors from the target's config alone (scripts/extra/cluster): peak memory by
part and whether it fits; arithmetic, traffic, speed and GPU-hours by a roofline whose assumptions
are named, over the plan of training for rows as long as those of data.path, or as assumed; hours
of data synthesis, of start-up and of training; bytes of stored features; and which key to set
where it does not fit, or where ranks wait for each other.
Prints a table, writes `out` (JSON). Exit code 0: it fits, 1: it does not, 2: a mistake to mend.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.conf.commit import commit
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.extra.cluster.config import DryRunConfig, keyed
from outrider.scripts.extra.cluster.plan import plan
from outrider.scripts.extra.cluster.table import table


@entry("validate", DryRunConfig)
def main(cfg: DryRunConfig) -> int:
    """Count, print, write."""
    files.check_out(Path(cfg.out))
    found = plan(cfg, lambda text: print(text, file=sys.stderr, flush=True))
    words = " ".join(a for a in sys.argv[1:] if not a.startswith("out="))
    found |= {"command": f"python scripts/validate.py {words}", "commit": commit()}
    path = Path(cfg.out)
    files.write_json(path, found)
    table(found).show()
    print(f"predicted, not measured; {path}")
    return 0 if found["memory"]["fits"] else 1


def command(argv: Sequence[str]) -> None:
    """The command line, with or without data."""
    main(keyed(argv))
