"""A loss or gradient that is not finite: no rank updates, and the rows that did it are named."""

from __future__ import annotations

import contextlib
import json

from accelerate.utils import gather_object
from torch import Tensor

from conf.errors import UserError
from train.run import Run


def stop_poisoned(run: Run, micro: list[list[int]], sound: Tensor) -> None:
    """Write what is known and raise UserError on every rank, so that none updates. micro: rows
    of this rank's passes; sound: [M] bool, which of their losses are finite.
    """
    step, folder = run.state.step, run.out / f"bad_step-{run.state.step}"
    guilty = [
        row for rows, good in zip(micro, sound.tolist(), strict=True) if not good for row in rows
    ]
    mine = [run.rows.where(r) for r in (guilty or [row for rows in micro for row in rows])]
    every = [(bool(guilty), mine)]
    if run.world > 1:
        every = gather_object(every)
    blamed = [w for sure, part in every if sure for w in part] or [
        w for _, part in every for w in part
    ]
    if run.main:
        norms = {
            n: str(float(p.grad.norm()))
            for n, p in run.head.named_parameters()
            if p.grad is not None
        }
        report = {"step": step, "rows": blamed, "gradient_norms": norms}
        with contextlib.suppress(OSError):  # a full disk must not hide what is told below
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    shown = ", ".join(blamed[:4]) + (f" and {len(blamed) - 4} more" if len(blamed) > 4 else "")
    raise UserError(
        f"{shown}: loss or gradient is not finite at step {step}, no weight was changed; "
        f"look at them or lower optim.lr (all rows are in {folder}/report.json)"
    )
