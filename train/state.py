"""The state of a run on disk: checkpoints/step-N, complete or absent, each file known by its sha256.

A checkpoint is a folder whose manifest verifies. It holds the head (so it can be decoded with), the optimizer's
moments and a few integers: the order of the data and the learning rate are functions of the step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from decode.identity import Identity, sha256_file
from heads.base import Head
from heads.checkpoint import read_card, recover, staged, write_head
from train.config import is_logistics

OPTIMIZER, STATE, MANIFEST = "optimizer.safetensors", "state.json", "manifest.json"


@dataclass
class State:
    """Where a run stands. step: updates done. evaluated: step of the last evaluation. best: {step, accepted_length}.

    window: sums since the last line of metrics. meaning: what the run learns, see `meaning`. seen: what the updates so
    far took, tokens and supervised tokens of all ranks, wall seconds and CPU seconds of rank 0 without evaluations.
    """

    step: int = 0
    evaluated: int = -1
    best: dict[str, float] = field(default_factory=dict)
    window: dict[str, list[float]] = field(default_factory=dict)
    meaning: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)

    def add(self, **amounts: float) -> None:
        """Count what an update took."""
        for name, amount in amounts.items():
            self.seen[name] = self.seen.get(name, 0.0) + amount


def save(folder: Path, state: State, head: Head, optimizer: torch.optim.Optimizer, identity: Identity | None) -> Path:
    """Write checkpoints/step-N under `folder`. Raises OSError, RuntimeError or SafetensorError when the disk refuses;
    older checkpoints are untouched then."""
    final = folder / "checkpoints" / f"step-{state.step}"
    with staged(final) as stage:
        write_head(head, stage, identity, {"step": state.step, "best": state.best, "training": state.seen})
        moments = {f"{i}.{k}": v.detach().cpu().contiguous() for i, entry in optimizer.state_dict()["state"].items()
                   for k, v in entry.items()}
        save_file(moments, stage / OPTIMIZER)
        (stage / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n")
        files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in sorted(stage.iterdir())}
        (stage / MANIFEST).write_text(json.dumps({"step": state.step, "files": files}, indent=1) + "\n")
    return final


def retire(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints. A failure to remove is no failure of the run."""
    for old in checkpoints(folder)[max(2, keep) :]:
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, sound or not."""
    found = [p for p in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when its manifest verifies."""
    path = checkpoint / MANIFEST
    try:
        files = json.loads(path.read_text())["files"]
        for name, wanted in files.items():
            file = checkpoint / name
            if Path(name).name != name:
                return f"{path}: names a file outside its folder ({name!r})"
            if not file.is_file():
                return f"{file}: is missing"
            if file.stat().st_size != wanted["bytes"] or sha256_file(file) != wanted["sha256"]:
                return f"{file}: size or sha256 differs from {MANIFEST}"
        missing = {OPTIMIZER, STATE} - set(files)
        return f"{path}: does not list {', '.join(sorted(missing))}" if missing else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else 'is unreadable'}"


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, and what is wrong with those that were passed over."""
    problems: list[str] = []
    for checkpoint in checkpoints(folder):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    return None, problems


def tidy(folder: Path) -> None:
    """Remove what killed saves left behind."""
    for name in ("head", "best"):
        recover(folder / name)
    for stage in (*folder.glob("checkpoints/.tmp-*"), *folder.glob("checkpoints/.old-*")):
        shutil.rmtree(stage, ignore_errors=True)


def read(checkpoint: Path) -> State:
    """The integers of a sound checkpoint."""
    return State(**json.loads((checkpoint / STATE).read_text()))


def restore(checkpoint: Path, head: Head, optimizer: torch.optim.Optimizer) -> None:
    """Load weights, calibration and moments into a head and optimizer of the same configuration.

    Raises UserError when they do not fit.
    """
    try:
        head.load_state_dict(load_file(checkpoint / "head.safetensors"))
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in load_file(checkpoint / OPTIMIZER).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        head.restore_json(json.loads((checkpoint / "head.json").read_text())["head"])
    except (KeyError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"{checkpoint}: does not fit this run ({line}); choose another out_dir") from None


def check_meaning(saved: dict[str, Any], now: dict[str, Any], folder: Path, default: dict[str, Any]) -> list[str]:
    """Lines about the logistics that changed. Raises UserError naming every key whose change alters what is learned.

    A key that the checkpoint does not know came with a later version: at its default it changes nothing.
    """
    new = {k for k in now if k not in saved and k in default and now[k] == default[k]}
    changed = [k for k in {**saved, **now} if saved.get(k) != now.get(k) and k not in new]
    refused = [f"{k}: {_show(saved.get(k))} in the checkpoint, {_show(now.get(k))} now"
               for k in changed if not is_logistics(k)]
    if refused:
        raise UserError(f"out_dir: {folder} holds a run that learns something else ({'; '.join(refused)}); "
                        "restore these values or choose another out_dir")
    return [f"{k}: {_show(saved.get(k))} -> {_show(now.get(k))}" for k in changed]


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12]


def is_final(folder: Path, step: int) -> bool:
    """Whether a head folder already holds the weights of `step`."""
    try:
        return read_card(folder)["extra"].get("step") == step
    except UserError:
        return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder. Raises UserError when another run has it, or it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"out_dir: cannot write to {folder} ({error.strerror}); choose another folder") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise UserError(f"out_dir: another run is writing to {folder}; wait for it or choose another folder") from None
    try:
        yield
    finally:
        os.close(handle)
