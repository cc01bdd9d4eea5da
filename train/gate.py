"""The parity gate at the end of a training run (heads/parity.py): decoding must find what
training has learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.conf.errors import CheckFailed
from outrider.heads.parity import check
from outrider.heads.registry import load_head
from outrider.train.data.batches import JoinedRows
from outrider.train.run import Run

RESULT = "parity.json"


def prompts_of(rows: JoinedRows, count: int) -> list[list[int]]:
    """Prompts of `count` rows: held-out ones first, then others (the gate asks whether two
    computations agree, which any text can tell)."""
    order = [*rows.held.nonzero()[:, 0].tolist(), *(~rows.held).nonzero()[:count, 0].tolist()]
    return [rows.prompt(row) for row in order[:count]]


def gate(run: Run) -> None:
    """Compare head, engine and OUT/head; write OUT/parity.json, a line of metrics and the
    table.

    Rank 0 does it alone, unless the target is sharded over the ranks. A gate that this step
    has passed is not run again. Raises CheckFailed when they disagree.
    """
    cfg, result, step = run.cfg.eval, run.out / RESULT, run.state.step
    if run.target.sharded:
        run.accelerator.wait_for_everyone()  # head/ is written, and no rank has written a result
    if not cfg.parity or not (run.target.sharded or run.main) or _passed(result, step):
        return
    if run.target.sharded:
        run.accelerator.wait_for_everyone()
    run.log.say(f"parity: training against decoding, on {cfg.parity} prompts")  # may take minutes
    found = check(
        run.head,
        run.target,
        prompts_of(run.rows, cfg.parity),
        cfg.max_new_tokens,
        room=run.room,
        reload=lambda: load_head(run.out / "head", run.target),
    )
    if run.main:
        result.write_text(json.dumps({"step": step, **found.json()}, indent=1) + "\n")
    run.log.metrics(step, {"event": "parity", **found.json()})
    for line in found.lines():
        run.log.say(line)
    if not found.passed:
        raise CheckFailed(
            f"parity: {run.out / 'head'}: {'; '.join(found.problems)}. The head is saved, but do "
            f"not trust its training figures; scripts/validate.py checks the parts ({result})"
        )


def _passed(path: Path, step: int) -> bool:
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
        return saved["step"] == step and saved["passed"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
