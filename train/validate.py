"""Check a training run before spending on it: scripts/validate.py is the command, this is the
work.

    python scripts/validate.py experiment=NAME data.path=FILE

Takes the keys of the training scripts, for every kind of head. Exit code 0: all checks passed;
1: one failed, and says why; 2: a mistake to mend in the configuration or the data.

    python scripts/validate.py dry_run=true experiment=NAME gpus=8 gpu=h100-80gb

With dry_run=true nothing is loaded or read: memory by part and hours on GPUs that are not
here, by formula (train/dry_run). Exit code 0: it fits, 1: it does not, and what to change is
said.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

# train/ stands first and would shadow libraries
sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.train import launch
from outrider.train.config import ValidateConfig as ValidateConfig

if __name__ == "__main__":
    launch.refuse("validate", ValidateConfig)

import torch
from omegaconf import OmegaConf
from torch import Tensor

from outrider.conf.schema import entry
from outrider.conf.typed import convert, raise_all
from outrider.decode.target import Target
from outrider.heads import head_class
from outrider.heads.base import Head
from outrider.heads.batch import hash_u63
from outrider.train import checks
from outrider.train.accelerator import device_of
from outrider.train.config import TrainConfig
from outrider.train.dry_run import report
from outrider.train.setup import first_head, prepared, resolve


def head_config(given: dict[str, Any]) -> Any:
    """The typed head keys. Raises UserError with every problem."""
    kind = head_class(str(given.get("kind")))
    value, problems = convert(OmegaConf.create(given), kind.Config)
    raise_all([f"head.{line}" for line in problems])
    return value


@entry("validate", ValidateConfig)
def main(cfg: ValidateConfig) -> int:
    """Run every check; a failed one does not stop the others."""
    run: TrainConfig = replace(cfg, head=head_config(cfg.head))
    if cfg.dry_run:
        fits, said = report.report(report.planned(cfg, run))
        print(said, flush=True)
        return 0 if fits else 1
    kind = head_class(run.head.kind)
    device_of(cfg.device)  # a GPU that is not there is said before anything is loaded
    print(f"[ok] configuration: {kind.kind}, every key known and in range", flush=True)
    target, plan = prepared(run)
    rows = plan.rows

    facts = kind, target, rows.counts(target.vocab_size), plan.per_epoch
    checked = resolve(replace(run, start=""), *facts)  # the checks look at a fresh head
    notes, settled = checked.notes, checked.cfg
    if run.start:  # what the run says of the weights that it starts from
        made = resolve(run, *facts)
        notes = [*made.notes, *first_head(made, kind, target)[1]]
    for note in notes:
        print(f"     {note}", flush=True)

    def fresh(counts: Tensor | None = None, **changes: Any) -> tuple[Target, Head]:
        """The target and a fresh head."""
        torch.manual_seed(hash_u63(cfg.seed, "head"))
        keys = settled.head
        known = {f.name for f in dataclasses.fields(keys)}
        keys = replace(keys, **{k: v for k, v in changes.items() if k in known})
        return target, kind.for_target(target, keys, checked.ranked if counts is None else counts)

    failed = []

    def tell(check: checks.Check) -> None:
        print(f"[{'ok' if check.passed else 'FAILED'}] {check.name}", flush=True)
        for line in check.lines:
            print(f"     {line}", flush=True)
        failed.extend([] if check.passed else [check.name])

    tell(checks.mask(rows, plan, target.tokenizer))
    _, head = fresh()
    batch = rows.batch(plan.batch(0)[:4]).to(target.device)
    tell(checks.gradients(target, head, batch))
    tell(checks.cost(settled, target, head, rows, plan))
    tell(checks.overfit(fresh, rows.prompt(int(plan.train[0]))))
    print(
        f"{len(failed)} of 4 checks failed: {', '.join(failed)}"
        if failed
        else "all 4 checks passed",
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    main()
