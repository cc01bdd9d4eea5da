"""A loss or gradient that is not finite: no rank updates, and the rows that did it are named."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from conf.errors import UserError
from heads.base import Head
from train.config import TrainConfig
from train.texts.batches import Rows


def stop_poisoned(
    cfg: TrainConfig,
    step: int,
    rows: Rows,
    poisoned: list[int],
    used: list[int],
    head: Head,
    accelerator: Accelerator,
) -> None:
    """Write what is known and raise UserError on every rank, so that none updates."""
    mine = [rows.where(r) for r in (poisoned or used)]
    every = [(bool(poisoned), mine)]
    if accelerator.num_processes > 1:
        every = gather_object(every)
    blamed = [w for sure, part in every if sure for w in part] or [
        w for _, part in every for w in part
    ]
    if accelerator.is_main_process:
        norms = {
            n: str(float(p.grad.norm())) for n, p in head.named_parameters() if p.grad is not None
        }
        folder = Path(cfg.out_dir) / f"bad_step-{step}"
        report = {"step": step, "rows": blamed, "gradient_norms": norms}
        with contextlib.suppress(OSError):  # a full disk must not hide what is told below
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    shown = ", ".join(blamed[:4]) + (f" and {len(blamed) - 4} more" if len(blamed) > 4 else "")
    raise UserError(
        f"{shown}: loss or gradient is not finite at step {step}, no weight was changed; "
        "look at them "
        f"or lower optim.lr (all rows are in {cfg.out_dir}/bad_step-{step}/report.json)"
    )
