"""Reading stored features in rounds, also while they are still being written (data.follow).

Rows, their order and the files of their features are known before the first feature is
(manifest.json), so nothing hangs on when a file comes: a run that waits, or is killed and goes on,
makes the same updates. A file is emptied when a checkpoint on disk holds all that it teaches.
"""

from __future__ import annotations

import time

from accelerate.utils import gather_object

from outrider.train.accelerator import PAUSE
from outrider.train.features import CachedTarget, check_last
from outrider.train.run import Run


def begin_round(run: Run) -> int:
    """Wait for the files of the next round, where one begins. Returns the signal that some
    rank was asked to stop by, 0 if none. Every rank must call it."""
    store, step, said = run.store, run.state.step, False
    if step < run.ready:
        return 0
    end, rows = run.plan.round(step)
    forget(run)
    while store is not None:
        mine = [(store.lacking(rows), run.stop.requested)]
        lacking, signals = zip(*(gather_object(mine) if run.world > 1 else mine), strict=True)
        if any(signals):
            return int(max(signals))
        if not any(lacking):
            break
        if not said:
            run.log.say(f"step {step}: waiting for {max(lacking)}")
        said = True
        time.sleep(PAUSE)
    # Spread weights have not all that is asked here.
    if store is not None and not run.ready and not run.target.sharded:
        batch = run.rows.batch(run.plan.batch(step))
        check_last(CachedTarget(run.target, store, batch), batch)
    run.ready = end
    vars(run).pop("feed", None)  # that of the last round is at its end
    return 0


def forget(run: Run) -> None:
    """Save, and empty the files whose rows the steps so far have learned, where asked to."""
    step = run.state.step
    if run.store is not None and run.cfg.data.follow_delete:
        run.save(wait=True)
        over, (_, left) = step >= run.plan.per_epoch, run.plan.round(step)
        row = run.rows.lines.numel() if over else int(left[0])
        run.store.forget(row, empty=run.main)
