"""A process that ends with the one that started it, whatever ends that one, and leaves no files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(
    command: Sequence[str], env: Mapping[str, str], work: Path, longest: float
) -> tuple[int, str]:
    """(exit code, what it wrote to stderr) of `command` in the folder `work`, which calls
    `end_with_parent`. It and all that it started are killed where this call ends otherwise. Raises
    subprocess.TimeoutExpired after `longest` seconds, and OSError where it cannot be started."""
    theirs, ours = os.pipe()
    try:
        with subprocess.Popen(
            command,
            env=env,
            cwd=work,
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child:
            try:
                said = child.communicate(timeout=longest)[1]
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        return child.returncode, said
    finally:
        os.close(theirs)
        os.close(ours)  # open until here: its end says that this process is gone


def end_with_parent(work: Path) -> None:
    """In the child: once the parent is gone, remove `work` and end, with all that was started."""

    def watch() -> None:
        os.read(0, 1)
        shutil.rmtree(work, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
