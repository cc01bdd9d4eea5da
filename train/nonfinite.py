"""Rows whose loss or gradient is not finite: they are left out of their step and named; many
steps in a row with such rows, or a step without any other, end the run.

The first pass of a step asks nothing of the device and may mix a bad row's gradient into the
others', also into those of other ranks. So a step that is not finite is computed again, a
micro-batch at a time and a bad one row by row, from the same random numbers.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.heads.batch import Batch, LossOut, hash_u63
from outrider.train.metrics import Shared, Sums
from outrider.train.run import Run


def redo_without_bad_rows(run: Run, sums: Sums) -> Shared:
    """Compute a step again without the rows that are not finite: the gradients and the
    statistics are those of the sound rows of all ranks. Every rank must call it.

    sums: of the first try. Raises UserError on every rank when no row is sound, a weight is
    not finite, or this is step number `bad_steps` in a row.
    """
    state = run.state
    passes = run.passes(state.step)  # rows of this rank's passes
    if state.unsound >= run.cfg.bad_steps or not _sound_weights(run):
        _stop(run, _blamed(run, passes, sums.finite))
    torch.manual_seed(hash_u63(run.cfg.seed, state.step, run.rank))
    sound = _SoundRows(run, sums)
    with run.accelerator.no_sync(run.model):
        skipped = [row for rows in passes for row in sound.refused(rows)]
    for p, grad in zip(run.trained, sound.gradients, strict=True):
        p.grad = grad
        if run.world > 1:  # as DDP would have left them: the mean over the ranks
            given = torch.zeros_like(p) if grad is None else grad
            p.grad = run.accelerator.reduce(given, "mean")  # type: ignore[assignment]
    _tell(run, sum(map(len, passes)) - len(skipped), skipped)
    return run.exchange(sound.sums)


def _everywhere(run: Run, mine: list[Any]) -> list[Any]:
    """Return the lists of all ranks, one behind the other."""
    return gather_object(mine) if run.world > 1 else mine


class _SoundRows:
    """Passes whose gradients count only where they are finite. gradients: of the trained
    parameters, None where no pass has given one. sums: of the sound passes, with every
    statistic that `tried` has."""

    def __init__(self, run: Run, tried: Sums) -> None:
        self.run, self.sums = run, Sums()
        self.sums.totals = {name: torch.zeros_like(total) for name, total in tried.totals.items()}
        self.sums.finite = [torch.ones_like(tried.finite[0])]
        self.gradients: list[Tensor | None] = [None for _ in run.trained]

    def refused(self, rows: list[int]) -> list[int]:
        """Count what is sound of these rows; the rows that are not.

        The layers of a sharded target are gathered from all ranks in every pass, so all of
        them must call this together: one that has nothing to try runs along.
        """
        bad = [] if self._taken(rows) else rows
        singly = bad if len(bad) > 1 else []
        most = max(_everywhere(self.run, [len(singly)])) if self.run.target.sharded else 0
        bad = [row for row in singly if not self._taken([row])] if singly else bad
        for _ in range(most - len(singly)):  # counts nothing, and leaves random numbers alone
            device = self.run.device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._pass(rows[:1])
        return bad

    def _pass(self, rows: list[int]) -> tuple[Batch, LossOut]:
        """Return a pass whose gradients are there alone."""
        self.run.optimizer.zero_grad(set_to_none=True)
        batch, target = self.run.make(self.run.state.step, rows)
        with self.run.clock.part("head"):
            batch = batch.to(self.run.device)
            out = self.run.model(batch, target)
            self.run.accelerator.backward(out.sum)
        return batch, out

    def _taken(self, rows: list[int]) -> bool:
        batch, out = self._pass(rows)
        norm = torch.nn.utils.get_total_norm(self.run.gradients)
        if not bool(out.sum.isfinite()) or not bool(norm.isfinite()):
            return False
        for i, (known, p) in enumerate(zip(self.gradients, self.run.trained, strict=True)):
            if p.grad is not None:
                self.gradients[i] = p.grad if known is None else known.add_(p.grad)
        self.sums.add(batch, out)
        return True


def _sound_weights(run: Run) -> bool:
    """Return whether every weight of every rank is finite."""
    bad = torch.stack([~p.detach().isfinite().all() for p in run.trained]).any().double()
    return not bool(run.accelerator.reduce(bad, "sum") if run.world > 1 else bad)


def _tell(run: Run, sound: int, skipped: list[int]) -> None:
    """Count and name the rows that were left out. sound: how many of this rank were not.
    Raises UserError when no rank has such a row."""
    rows = _everywhere(run, [run.rows.where(row) for row in skipped])
    if not sum(_everywhere(run, [sound])):
        _stop(run, rows)
    run.state.skipped += len(rows)
    step = run.state.step
    if not rows:
        run.log.say(
            f"step {step}: the loss was not finite, and finite when it was computed again: rows "
            "and weights are sound; look at the hardware if this comes again"
        )
        return
    run.log.say(f"step {step}: {_listed(rows)}: loss or gradient is not finite; left out")
    run.log.metrics(step, {"event": "skipped", "rows": rows, "skipped_rows": run.state.skipped})


def _blamed(run: Run, passes: list[list[int]], finite: list[Tensor]) -> list[str]:
    """Return where the rows are from whose loss was not finite; all rows of the step where
    every loss was."""
    guilty = [row for rows, good in zip(passes, finite, strict=True) if not good for row in rows]
    found = _everywhere(run, [run.rows.where(row) for row in guilty])
    return found or _everywhere(run, [run.rows.where(row) for rows in passes for row in rows])


def _listed(rows: list[str]) -> str:
    return ", ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


def _stop(run: Run, rows: list[str]) -> NoReturn:
    """Write the rows into metrics.jsonl and raise UserError: no rank updates."""
    step = run.state.step
    run.log.metrics(step, {"event": "not finite", "rows": rows})
    raise UserError(
        f"{_listed(rows)}: loss or gradient is not finite at step {step}, no weight was changed; "
        "look at them, leave them out with data.skip=[LINE, ..] (FILE:LINE where there are several "
        f"files) or lower optim.lr (all rows are in {run.log.path})"
    )
