"""Commands one after the other, each done once: what a job is made of that goes on where it
was stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from conf.errors import Interrupted, UserError
from scripts.common import files


@dataclass(frozen=True)
class Step:
    """One command, the files it reads and the file that it leaves when it is done."""

    title: str
    args: list[str]
    reads: list[Path]
    leaves: Path


def fingerprint(step: Step) -> str:
    """Changes with the command and with what it reads."""
    stats = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in step.reads if p.exists()]
    return hashlib.sha256(json.dumps([step.args, stats]).encode()).hexdigest()


def done(step: Step, folder: Path) -> bool:
    """Whether the very step has been remembered in `folder`, and what it leaves is there."""
    try:
        marks = json.loads((folder / "done.json").read_text())
    except (OSError, ValueError):
        return False
    return step.leaves.exists() and marks.get(str(step.leaves)) == fingerprint(step)


def remember(step: Step, folder: Path) -> None:
    """Note in `folder` that a step is done."""
    path = folder / "done.json"
    marks = json.loads(path.read_text()) if path.exists() else {}
    files.write_json(path, {**marks, str(step.leaves): fingerprint(step)})


def run(step: Step, job: str, folder: Path, good: Collection[int] = (0,)) -> None:
    """Run a step as the user would. Its own messages have said why it failed. good: the exit
    codes with which it has done its work.

    Raises UserError, and Interrupted where the step was stopped.
    """
    # Waiting threads that spin starve each other on shared cores.
    env = {"GOMP_SPINCOUNT": "1000", **os.environ}
    script = files.here(Path(step.args[0]))  # a job may run from any folder
    code = subprocess.call([sys.executable, str(script), *step.args[1:]], env=env)
    if code in (130, 75, -2, -15):
        raise Interrupted(f"{job}: stopped; the same command goes on from here")
    if code not in good:
        raise UserError(
            f"{job}: `python {shlex.join(step.args)}` ended with exit code {code}; see its message "
            "above"
        )
    if not step.leaves.exists():
        raise UserError(
            f"{job}: {step.leaves} is missing after its step; remove {folder} and start again"
        )
