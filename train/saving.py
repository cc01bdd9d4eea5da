"""Saving beside the training: a snapshot in host memory, then a thread that writes, syncs and
renames it.

What a step waits for is the copy. A save that is due while the last one is still being written
waits for it, so at most one snapshot exists; the last save of a run is always awaited. All
ranks compare step and weights before anything is
written: ranks that have drifted apart leave no checkpoint. A disk that refuses costs a
checkpoint and is told; RETRIES in a row end the run.
"""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor

from outrider.conf import disk as files
from outrider.conf.errors import UserError, first_line
from outrider.decode.models.identity import Identity
from outrider.heads.base import Head
from outrider.train import checkpoint as disk
from outrider.train.checkpoint import Snapshot, State
from outrider.train.config import TrainConfig, defaults
from outrider.train.lock import Lock
from outrider.train.log import Log
from outrider.train.signals import Stop

RETRIES = 3  # saves that may fail in a row before the run gives up
REFUSED = (OSError, RuntimeError, SafetensorError, MemoryError, UserError)


class Saver:
    """The checkpoints of a run. begun: step of the newest save, finished or not; written: of the
    newest one that is known to be on disk; -1 for none. Both are the same on every rank, as is
    `failures`, the saves in a row that were refused."""

    def __init__(
        self,
        cfg: TrainConfig,
        accelerator: Accelerator,
        lock: Lock | None,
        log: Log,
        written: int,
    ) -> None:
        """lock: on rank 0 alone."""
        self.cfg, self.out, self.accelerator = cfg, Path(cfg.out_dir), accelerator
        self.log, self.lock = log, lock
        self.begun, self.written, self.failures = written, written, 0
        self._flying = -1  # step of the save that is being written
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._host: dict[str, Tensor] = {}

    def save(
        self,
        state: State,
        head: Head,
        optimizer: torch.optim.Optimizer,
        identity: Identity | None,
        wait: bool,
    ) -> str:
        """Save the state of this step. wait: until it is on disk. Returns what was wrong with
        the newest save whose outcome is known, empty if nothing; the same on every rank.
        Raises UserError when the ranks have drifted apart or a weight is not finite; then
        nothing is written."""
        problem = self.settle()
        if self.failures == RETRIES and not wait:
            return problem
        self.begun = state.step
        self._agree(state, head)
        self._flying, self._problem = state.step, "it was not finished"
        beside = self.cfg.async_save and not wait
        if self.accelerator.is_main_process:
            try:
                snapshot = self._snapshot(state, head, optimizer, identity, beside)
            except (RuntimeError, MemoryError):  # no room for a copy
                self._host, beside = {}, False
                snapshot = self._snapshot(state, head, optimizer, identity, beside)
            if beside:
                self._thread = threading.Thread(target=self._write, args=(snapshot,), name="save")
                self._thread.start()
            else:
                self._write(snapshot)
        return problem if self.cfg.async_save and not wait else self.settle()

    def settle(self) -> str:
        """Wait for the save in flight, if there is one; what was wrong with it, the same on
        every rank.
        """
        if self._flying < 0:
            return ""
        self.close()
        problem = str(agreed(self._problem, self.accelerator))
        step, self._flying = self._flying, -1
        self.failures, self.written = (self.failures + 1, self.written) if problem else (0, step)
        return problem

    def close(self) -> None:
        """Wait until nothing is being written; asks no other rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot) -> None:
        """On rank 0, in the thread or in its place."""
        try:
            snapshot.ready()
            if self.lock is not None:
                self.lock.renew()
            disk.save(self.out, snapshot)
            disk.retire(self.out, self.cfg.keep, snapshot.step)
            self._problem = ""
        except REFUSED as error:
            self._problem = first_line(error)
            self.log.say(
                f"step {snapshot.step}: checkpoint not written ({self._problem}); older ones "
                "are untouched"
            )

    def _snapshot(
        self,
        state: State,
        head: Head,
        optimizer: torch.optim.Optimizer,
        identity: Identity | None,
        beside: bool,
    ) -> Snapshot:
        """All that a checkpoint holds. beside: as a copy, in host buffers that are used again;
        on a GPU the copies are queued behind the step, and `ready` waits for them."""
        moments = {
            f"{i}.{k}": v
            for i, entry in optimizer.state_dict()["state"].items()
            for k, v in entry.items()
        }
        weights = {k: self._copy(f"head.{k}", v, beside) for k, v in head.state_dict().items()}
        moments = {k: self._copy(f"optimizer.{k}", v, beside) for k, v in moments.items()}
        event = None
        if beside and self.accelerator.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        saved = json.loads(json.dumps(head.config_json()))
        return Snapshot(asdict(state), weights, moments, head.kind, saved, identity, event)

    def _copy(self, name: str, value: Tensor, beside: bool) -> Tensor:
        value = value.detach()
        if not beside:
            return value.to("cpu").contiguous()
        buffer = self._host.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._host[name] = buffer
        return buffer.copy_(value, non_blocking=value.is_cuda)

    def _agree(self, state: State, head: Head) -> None:
        """All ranks are at the same step with the same weights, bit for bit, and every weight
        is finite.
        """
        mine = [p.detach() for p in head.parameters() if p.requires_grad]
        finite = torch.stack([p.isfinite().all() for p in mine]).all()
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
        total = torch.stack(
            [p.contiguous().view(bits[p.element_size()]).sum(dtype=torch.int64) for p in mine]
        ).sum()
        found = torch.stack([torch.full_like(total, state.step), total, finite.to(total.dtype)])
        several = self.accelerator.num_processes > 1
        every = (self.accelerator.gather(found[None]) if several else found[None]).tolist()
        if not all(row[2] for row in every):
            raise UserError(
                f"optim.lr: weights are not finite at step {state.step}, no checkpoint was "
                f"written; lower it and start again from the newest one in {self.out}"
            )
        apart = [rank for rank, row in enumerate(every) if row[:2] != every[0][:2]]
        if apart:
            raise UserError(
                f"out_dir: rank {apart[0]} has other weights than rank 0 at step {state.step}, no "
                "checkpoint was written; look at its hardware, then start the same command again "
                f"to go on from the newest one in {self.out}"
            )


def needed(cfg: TrainConfig, head: Head, step: int = 0) -> int:
    """Bytes that a run will still put into its folder from `step` on: checkpoints, one more
    than are kept while it is written, head/ and best/, and a copy of one as it is replaced."""
    out, trained = Path(cfg.out_dir), [p for p in head.parameters() if p.requires_grad]
    weights = sum(v.nbytes for v in head.state_dict().values())
    every, left = cfg.save_every or cfg.steps, step < cfg.steps
    due = -(-cfg.steps // every) - step // every if left else 0
    more = max(0, min(due, cfg.keep + 1 - len(disk.checkpoints(out))))
    heads = sum(not (out / name).exists() for name in ("head", "best")) + left
    moments = 2 * sum(p.nbytes for p in trained)
    return more * (weights + moments) + heads * weights + disk.MARGIN


def check_space(cfg: TrainConfig, head: Head, step: int, accelerator: Accelerator) -> None:
    """Raises UserError on every rank where the run folder's disk cannot hold the run."""
    problem = ""
    if accelerator.is_main_process:
        try:
            fix = "give another out_dir, or a smaller keep"
            files.check_space("out_dir", Path(cfg.out_dir), needed(cfg, head, step), fix)
        except UserError as error:
            problem = str(error)
    if problem := agreed(problem, accelerator):
        raise UserError(problem)


def last_state(out: Path, accelerator: Accelerator) -> tuple[Path | None, State, list[str]]:
    """(the newest sound checkpoint in the run folder, the state that it holds, what was passed
    over); without one (None, a fresh state, ..). The same on every rank."""
    found: tuple[str | None, list[str]] = (None, [])
    if accelerator.is_main_process:
        disk.tidy(out)
        checkpoint, problems = disk.newest(out)
        found = (str(checkpoint) if checkpoint else None, [f"passed over: {p}" for p in problems])
    path, notes = agreed(found, accelerator)
    return (None, State(), notes) if path is None else (Path(path), disk.read(Path(path)), notes)


def resume(
    checkpoint: Path | None,
    state: State,
    cfg: TrainConfig,
    meaning: dict[str, Any],
    head: Head,
    optimizer: torch.optim.Optimizer,
) -> list[str]:
    """Restore a checkpoint of this run, if there is one, into head and optimizer; returns what
    to tell the user. state: the checkpoint's. meaning: of the run as it goes on.

    Raises UserError where that is another run."""
    if checkpoint is None:
        return []
    out = Path(cfg.out_dir)
    changes = disk.check_meaning(state.meaning, meaning, out, defaults(cfg))
    anew = disk.replanned(state.meaning, meaning, defaults(cfg))
    disk.restore(checkpoint, head, optimizer)
    notes = [f"resuming {out} at step {state.step} of {cfg.steps}"]
    notes += [f"changed, which is allowed: {line}" for line in changes]
    return notes + [f"changed from step {state.step} on: {line}" for line in anew]


def agreed(value: Any, accelerator: Accelerator) -> Any:
    """Rank 0's value on every rank."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def requested_anywhere(stop: Stop, accelerator: Accelerator) -> int:
    """The signal that some rank was asked to stop by, 0 if none; the same truth on every rank."""
    if accelerator.num_processes == 1:
        return stop.requested
    mine = torch.tensor([float(bool(stop.requested))], device=accelerator.device)
    return int(bool(accelerator.reduce(mine, "sum").item())) and (stop.requested or signal.SIGTERM)  # type: ignore[union-attr]
