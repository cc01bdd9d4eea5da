"""The state of a run on disk: checkpoints/step-N, complete or absent, and the lock of its
folder.

A checkpoint is a folder that was staged, synced and renamed. It holds the head (so it can
be decoded with), the optimizer's moments and a few integers: the order of the data and the
learning rate are functions of the step. It is written from a snapshot in host memory by a
thread beside the training, which waits for the copy alone; a save that is due while the
last one is being written waits for it. Before anything is written all ranks compare step
and weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.conf.errors import UserError, first_line
from outrider.decode.models.identity import Identity
from outrider.heads.base import Head
from outrider.heads.checkpoint import CARD, read_card, recover, staged, write_card

WEIGHTS, OPTIMIZER, STATE = "head.safetensors", "optimizer.safetensors", "state.json"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, RuntimeError)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system without them


@dataclass
class State:
    """The state of a run. step: updates done. evaluated: step of the last evaluation. best:
    {step, accepted_length}.

    window: sums since the last line of metrics. meaning: what the run learns, see
    train/resuming. seen: what the updates so far took, tokens and supervised tokens of all
    ranks, wall seconds and CPU seconds of rank 0 without evaluations. skipped: steps without
    an update so far, since loss or gradient was not finite; skipped_in_a_row: the last ones.
    spent: seconds of rank 0 in all steps but the last.
    """

    step: int = 0
    evaluated: int = -1
    best: dict[str, float] = field(default_factory=dict)
    window: dict[str, list[float]] = field(default_factory=dict)
    meaning: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    skipped_in_a_row: int = 0
    spent: float = 0.0

    def add(self, **amounts: float) -> None:
        """Count what an update took."""
        for name, amount in amounts.items():
            self.seen[name] = self.seen.get(name, 0.0) + amount

    def add_to_window(self, found: dict[str, list[float]]) -> None:
        """Count a step's statistics, name -> [sum, count], for the next line of metrics."""
        for name, (total, count) in found.items():
            old = self.window.get(name, [0.0, 0.0])
            self.window[name] = [old[0] + total, old[1] + count]

    def took(self) -> dict[str, float]:
        """Return `seen`, rounded for a line of metrics."""
        return {name: round(amount, 2) for name, amount in self.seen.items()}


# Saving
# -------------------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """All that a checkpoint holds, in host memory. state: as JSON. head, moments: by name, on
    the CPU. saved: what the head's from_json needs."""

    state: dict[str, Any]
    head: dict[str, Tensor]
    moments: dict[str, Tensor]
    kind: str
    saved: dict[str, Any]
    identity: Identity | None


class Saver:
    """The checkpoints of a run. begun: step of the newest save, finished or not, the same on
    every rank; -1 for none."""

    def __init__(self, out: Path, keep: int, accelerator: Accelerator, begun: int) -> None:
        """out: the run folder. keep: checkpoints that stay."""
        self.out, self.keep, self.accelerator, self.begun = out, keep, accelerator, begun
        self._flying = False  # a save has begun whose outcome the ranks do not know
        self._thread: threading.Thread | None = None
        self._problem = ""

    def save(
        self,
        state: State,
        head: Head,
        optimizer: torch.optim.Optimizer,
        identity: Identity | None,
        wait: bool,
    ) -> None:
        """Save the state of this step, once. wait: until it is on disk.

        Raises UserError on every rank when the disk refused this save (wait) or the one
        before, the ranks have drifted apart, or a weight is not finite; older checkpoints
        are untouched then.
        """
        if self.begun != state.step:
            self.settle()
            _agree(state, head, self.accelerator, self.out)
            self.begun, self._flying, self._problem = state.step, True, "it was not finished"
            if self.accelerator.is_main_process:
                snapshot = _snapshot(state, head, optimizer, identity)
                self._thread = threading.Thread(target=self._write, args=(snapshot,), name="save")
                self._thread.start()
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait for the save in flight, if there is one. Raises UserError on every rank when
        it did not reach the disk."""
        if not self._flying:
            return
        self.close()
        self._flying = False
        if problem := agreed(self._problem, self.accelerator):
            raise UserError(
                f"out_dir: cannot save to {self.out} ({problem}); free space or mend permissions, "
                "then start the same command again"
            )

    def close(self) -> None:
        """Wait until nothing is being written; asks no other rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot) -> None:
        """On rank 0, in the thread."""
        try:
            write(self.out, snapshot)
            retire(self.out, self.keep, snapshot.state["step"])
            self._problem = ""
        except (RuntimeError, OSError, SafetensorError, MemoryError) as error:
            self._problem = first_line(error)


def _snapshot(
    state: State, head: Head, optimizer: torch.optim.Optimizer, identity: Identity | None
) -> Snapshot:
    """Return a copy of all that a checkpoint holds."""
    moments = {
        f"{i}.{k}": v
        for i, entry in optimizer.state_dict()["state"].items()
        for k, v in entry.items()
    }
    weights, moments = (
        {k: v.detach().to("cpu", copy=True).contiguous() for k, v in part.items()}
        for part in (head.state_dict(), moments)
    )
    saved = json.loads(json.dumps(head.config_json()))
    return Snapshot(asdict(state), weights, moments, head.kind, saved, identity)


def _agree(state: State, head: Head, accelerator: Accelerator, out: Path) -> None:
    """Raise UserError unless all ranks are at the same step with the same weights, bit for
    bit, and every weight is finite."""
    mine = [p.detach() for p in head.parameters() if p.requires_grad]
    finite = torch.stack([p.isfinite().all() for p in mine]).all()
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    total = torch.stack(
        [p.contiguous().view(bits[p.element_size()]).sum(dtype=torch.int64) for p in mine]
    ).sum()
    found = torch.stack([torch.full_like(total, state.step), total, finite.to(total.dtype)])
    several = accelerator.num_processes > 1
    every = (accelerator.gather(found[None]) if several else found[None]).tolist()
    if not all(row[2] for row in every):
        raise UserError(
            f"optim.lr: weights are not finite at step {state.step}, no checkpoint was "
            f"written; lower it and start again from the newest one in {out}"
        )
    apart = [rank for rank, row in enumerate(every) if row[:2] != every[0][:2]]
    if apart:
        raise UserError(
            f"out_dir: rank {apart[0]} has other weights than rank 0 at step {state.step}, no "
            "checkpoint was written; look at its hardware, then start the same command again "
            f"to go on from the newest one in {out}"
        )


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write checkpoints/step-N under `folder`. Raises OSError, RuntimeError or SafetensorError
    when the disk refuses; older checkpoints are untouched then."""
    state = snapshot.state
    final = folder / "checkpoints" / f"step-{state['step']}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with staged(final) as stage:
        save_file(snapshot.head, stage / WEIGHTS)
        about = {"step": state["step"], "best": state["best"], "training": state["seen"]}
        write_card(stage, WEIGHTS, snapshot.kind, snapshot.saved, snapshot.identity, about)
        save_file(snapshot.moments, stage / OPTIMIZER)
        (stage / STATE).write_text(json.dumps(state, indent=1) + "\n")
    return final


def retire(folder: Path, keep: int, step: int) -> None:
    """Remove all checkpoints but the newest `keep` up to `step`; those of later steps are ones
    that the run has passed over. A failure to remove is no failure of the run."""
    found = checkpoints(folder)
    kept = [p for p in found if step_of(p) <= step][:keep]
    for old in found:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)


def agreed(value: Any, accelerator: Accelerator) -> Any:
    """Return rank 0's value on every rank."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


# Reading
# -------------------------------------------------------------------------------------------


def step_of(checkpoint: Path) -> int:
    """Return N of step-N."""
    return int(checkpoint.name[5:])


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, newest first, sound or not."""
    found = [
        p for p in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)
    ]
    return sorted(found, key=step_of, reverse=True)


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None when every file is
    there and as long as it says."""
    path = checkpoint / STATE
    try:
        if json.loads(path.read_text())["step"] != step_of(checkpoint):
            return f"{path}: is not the state of {checkpoint.name}"
        read_card(checkpoint)
        for path in (checkpoint / WEIGHTS, checkpoint / OPTIMIZER):
            with safe_open(path, "pt"):
                pass
    except UserError as error:
        return str(error)
    except (*UNREADABLE, SafetensorError) as error:
        return f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else 'is damaged'}"
    return None


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest sound checkpoint, and what is wrong with those that were passed
    over."""
    problems: list[str] = []
    for checkpoint in checkpoints(folder):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    return None, problems


def last_state(out: Path, accelerator: Accelerator) -> tuple[Path | None, State, list[str]]:
    """Return (the newest sound checkpoint in the run folder, the state that it holds, what was
    passed over); without one (None, a fresh state, ..). The same on every rank."""
    found: tuple[str | None, list[str]] = (None, [])
    if accelerator.is_main_process:
        for name in ("head", "best"):  # what killed saves left behind
            recover(out / name)
        for stage in (*out.glob("checkpoints/.tmp-*"), *out.glob("checkpoints/.old-*")):
            shutil.rmtree(stage, ignore_errors=True)
        checkpoint, problems = newest(out)
        found = (str(checkpoint) if checkpoint else None, [f"passed over: {p}" for p in problems])
    path, notes = agreed(found, accelerator)
    return (None, State(), notes) if path is None else (Path(path), read(Path(path)), notes)


def read(checkpoint: Path) -> State:
    """Return the integers of a sound checkpoint. Raises UserError when another version
    wrote it."""
    try:
        return State(**json.loads((checkpoint / STATE).read_text()))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{checkpoint / STATE}: this version cannot read it ({error}); use the version that "
            "wrote it, or choose another out_dir"
        ) from None


def restore(checkpoint: Path, head: Head, optimizer: torch.optim.Optimizer) -> None:
    """Load weights, calibration and moments into a head and optimizer of the same
    configuration.

    Raises UserError when they do not fit.
    """
    try:
        head.load_state_dict(load_file(checkpoint / WEIGHTS))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(checkpoint / OPTIMIZER).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value
        optimizer.load_state_dict(
            {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
        )
        head.restore_json(json.loads((checkpoint / CARD).read_text())["head"])
    except (KeyError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(
            f"{checkpoint}: does not fit this run ({first_line(error)}); choose another out_dir"
        ) from None


def is_final(folder: Path, step: int) -> bool:
    """Return whether a head folder already holds the weights of `step`."""
    try:
        return read_card(folder)["extra"].get("step") == step
    except UserError:
        return False


# The lock
# -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder, by a lock that dies with its process. Raises UserError when another
    run has it, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"out_dir: cannot write to {folder} ({error.strerror}); choose another folder"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(handle)
            raise UserError(
                f"out_dir: another run is writing to {folder}; wait for it or choose another folder"
            ) from None
        said = f"out_dir: {folder} is on a file system without locks; start no second run there"
        print(said, file=sys.stderr, flush=True)
    try:
        yield
    finally:
        os.close(handle)
