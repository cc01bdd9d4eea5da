"""A llama.cpp server of our own: started in its environment, waited for, asked, stopped. It
listens on loopback alone and dies with this process.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from scripts.common import files

START = 180.0  # seconds to load the models
STOP = 20.0  # seconds to end
TALK = 5  # the log level that writes every draft token
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\)")
DRAFTED = re.compile(r"generate_draft: id=(\d+), .*#draft=(\d+)")


@dataclass(frozen=True)
class Settings:
    """What a server runs. draft: "" for none. method: EAGLE3 or SIMPLE. context: tokens of
    each slot."""

    model: str
    draft: str = ""
    method: str = ""
    draft_tokens: int = 0
    probabilistic: bool = False
    slots: int = 1
    context: int = 1024
    threads: int = 1
    talk: int = TALK


@dataclass(frozen=True)
class Running:
    """A server that answers. log: its standard error."""

    url: str
    version: str
    log: Path


@contextmanager
def running(python: Path, settings: Settings, work: Path, name: str) -> Iterator[Running]:
    """A server while the block runs. Raises UserError with the log's last line when it does
    not come up in time."""
    job, log = work / f"{name}.server.json", work / f"{name}.server.log"
    files.write_json(job, asdict(settings))
    worker = Path(__file__).with_name("run_llamacpp.py")
    with open(log, "w") as told:
        process = subprocess.Popen(
            [str(python), str(worker), str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
        )
        try:
            said = _first_line(process, time.monotonic() + START)
            if said is None:
                raise UserError(f"llama.cpp: {_reason(process, log)}; all of it: {log}")
            yield Running(said["url"], said["version"], log)
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
    assert process.stdout is not None
    while time.monotonic() < until:
        ready, _, _ = select.select([process.stdout], [], [], 0.2)
        if not ready:
            continue
        line = process.stdout.readline()
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


def _reason(process: subprocess.Popen[str], log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"error:|error loading|abort", line, re.I)]
    state = "is not ready" if process.poll() is None else f"ended with code {process.poll()}"
    first = (wrong or lines[-1:] or ["no output"])[0]
    return f"the server {state} ({first.strip()[:200]})"


def drafts(log: Path, start: int = 0) -> list[tuple[int, list[tuple[int, float]]]]:
    """Every draft that a server wrote to its log behind byte `start`: (the token it stands
    behind, [(draft token, its share among the ten best)])."""
    with open(log, "rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    out, path = [], []
    for line in text.splitlines():
        found = CANDIDATE.search(line)
        if found:
            path.append((int(found[2]), float(found[3])))
            continue
        done = DRAFTED.search(line)
        if done:
            out.append((int(done[1]), path[: int(done[2])]))
            path = []
    return out
