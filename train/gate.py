"""The parity gate at the end of a training run (heads/parity.py): decoding must find what
training has learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from conf.errors import CheckFailed
from decode.target import Target
from heads.base import Head
from heads.parity import check
from heads.registry import load_head
from train.config import TrainConfig
from train.log import Log
from train.texts.batches import Rows

RESULT = "parity.json"


def prompts_of(rows: Rows, count: int) -> list[list[int]]:
    """Prompts of `count` rows: held-out ones first, then others (the gate asks whether two
    computations agree, which any text can tell)."""
    order = [*rows.held.nonzero()[:, 0].tolist(), *(~rows.held).nonzero()[:count, 0].tolist()]
    return [rows.prompt(row) for row in order[:count]]


def gate(
    cfg: TrainConfig,
    out: Path,
    head: Head,
    target: Target,
    rows: Rows,
    accelerator: Accelerator,
    log: Log,
    step: int,
) -> None:
    """Compare head, engine and OUT/head; write OUT/parity.json, a line of metrics and the
    table.

    Rank 0 does it alone, unless the target is sharded over the ranks. A gate that this step
    has passed is not run again. Raises CheckFailed when they disagree.
    """
    together = getattr(target, "sharded", False)
    if together:
        accelerator.wait_for_everyone()  # the head is written, and no rank has written a result
    if (
        not cfg.eval.parity
        or not (together or accelerator.is_main_process)
        or _passed(out / RESULT, step)
    ):
        return
    if together:
        accelerator.wait_for_everyone()
    found = check(
        head,
        target,
        prompts_of(rows, cfg.eval.parity),
        cfg.eval.max_new_tokens,
        reload=lambda: load_head(out / "head", target),
    )
    if accelerator.is_main_process:
        (out / RESULT).write_text(json.dumps({"step": step, **found.json()}, indent=1) + "\n")
    log.metrics(step, {"event": "parity", **found.json()})
    for line in found.lines():
        log.say(line)
    if not found.passed:
        raise CheckFailed(
            f"parity: {out / 'head'}: {'; '.join(found.problems)}. The head is saved, "
            "but do not trust "
            f"its training figures; scripts/validate.py checks the parts ({out / RESULT})"
        )


def _passed(path: Path, step: int) -> bool:
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
        return saved["step"] == step and saved["passed"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
