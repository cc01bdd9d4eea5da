"""A step whose loss or gradient is not finite makes no update: its rows are named, and many
such steps in a row end the run.

Where the loss of a pass is not finite its rows are named, otherwise those of the whole step;
smaller passes (micro_batch) name fewer.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from outrider.conf.errors import UserError
from outrider.train.metrics import Sums
from outrider.train.run import Run


def pass_over(run: Run, sums: Sums) -> None:
    """Go on behind a step that is not finite. sums: of its passes. Every rank must call it.
    Raises UserError on every rank where this is step number `bad_steps` in a row."""
    state, passes = run.state, run.passes(run.state.step)
    guilty = [rows for rows, fine in zip(passes, sums.finite, strict=True) if not bool(fine)]
    rows = _everywhere(run, guilty) or _everywhere(run, passes)
    state.step, state.skipped, state.skipped_in_a_row = (
        state.step + 1,
        state.skipped + 1,
        state.skipped_in_a_row + 1,
    )
    named = ", ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
    event = {"rows": rows, "skipped_steps": state.skipped}
    if state.skipped_in_a_row >= run.cfg.bad_steps:
        run.log.metrics(state.step, {"event": "not finite", **event})
        raise UserError(
            f"{named}: loss or gradient is not finite at step {state.step}, no weight was changed; "
            "look at them (with micro_batch=1 single rows are named), leave them out with "
            "data.skip=[LINE, ..] (FILE:LINE where there are several files; not with data.follow), "
            f"raise bad_steps or lower optim.lr (all rows are in {run.log.path})"
        )
    run.log.say(f"step {state.step}: {named}: loss or gradient is not finite; no update")
    run.log.metrics(state.step, {"event": "skipped", **event})


def _everywhere(run: Run, passes: list[list[int]]) -> list[str]:
    """Return "file:line" of the rows of these passes and of those of the other ranks."""
    mine: list[Any] = [run.rows.where(row) for rows in passes for row in rows]
    return gather_object(mine) if run.world > 1 else mine
