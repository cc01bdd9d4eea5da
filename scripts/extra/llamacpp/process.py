"""A server of an engine, of our own: started in its environment, waited for, stopped. It listens
on loopback alone and dies with this process.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common import files

START = 180.0  # seconds to load the models
STOP = 20.0  # seconds to end


@dataclass(frozen=True)
class Running:
    """A server that answers. log: its standard error. system: what its build makes use of, in
    its own words."""

    url: str
    version: str
    log: Path
    system: str = ""


@dataclass(frozen=True)
class Program:
    """What starts a server. engine: its name for people. python: of its environment. worker:
    the script that is run there with the settings; it prints one JSON line {"url", "version"},
    and "system" where it knows, when it answers, and ends with its standard input. patience:
    seconds to load the models."""

    engine: str
    python: Path
    worker: Path
    patience: float = START


@contextmanager
def running(
    program: Program, settings: Mapping[str, Any], work: Path, name: str
) -> Iterator[Running]:
    """A server while the block runs. Raises UserError with the log's last line when it does
    not come up in time."""
    job, log = work / f"{name}.server.json", work / f"{name}.server.log"
    files.write_json(job, dict(settings))
    with open(log, "w") as message:
        process = subprocess.Popen(
            [str(program.python), str(program.worker), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=message,
            text=True,
        )
        try:
            said = _first_line(process, time.monotonic() + program.patience)
            if said is None:
                raise UserError(f"{program.engine}: {_reason(process, log)}; all of it: {log}")
            yield Running(said["url"], said["version"], log, said.get("system", ""))
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _first_line(process: subprocess.Popen[str], until: float) -> dict[str, Any] | None:
    """The JSON line that says where it listens; None when it ended or time is over."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_forward, args=(process, lines), daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            return None
        if not line:  # it has ended, or is about to
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP)
            return None
        try:
            said = json.loads(line)
        except ValueError:
            continue  # a library's own words
        if isinstance(said, dict) and "url" in said:
            return said
    return None


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """What it prints, line by line; at its end an empty one."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed by whoever started it
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _reason(process: subprocess.Popen[str], log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"error:|error loading|abort", line, re.I)]
    state = "is not ready" if process.poll() is None else f"ended with code {process.poll()}"
    first = (wrong or lines[-1:] or ["no output"])[0]
    return f"the server {state} ({first.strip()[:200]})"
