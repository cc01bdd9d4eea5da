"""A rehearsal that is killed once in every command and begun again, against one that was left
alone."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from outrider.conf.errors import UserError
from outrider.scripts.common import files
from outrider.scripts.lab.rehearsing.stand_ins import Line

NOW = "now.json"  # which command is under way, in the folder of a rehearsal
SHARE = 0.5  # of a command's time after which it is killed
LEAST = 1.0  # seconds after which at least
LOOK = 0.2  # seconds between two looks


def begun(work: Path, line: Line) -> None:
    """Note which command is under way."""
    files.write_json(work / NOW, {"written": line.written, "at": time.time()})


def compare(out: Path, against: Path, command: list[str], work: Path, lines: list[Line]) -> int:
    """Kill `command` once in every command of `lines` and write what differs in the end; the
    exit code. Raises UserError where the rehearsal to compare with is not there, or where one
    that was begun again fails."""
    try:
        alone = json.loads(against.read_text())
    except (OSError, ValueError):
        raise UserError(f"against: {against} is no rehearsal; run one without kills") from None
    seconds = {row["written"]: row["seconds"] for row in alone["steps"]}
    done: list[dict[str, Any]] = []
    while (row := _run(command, work, seconds, {one["written"] for one in done})) is not None:
        done.append(row)
        print(f"killed after {row['after']:.0f} s: {row['written']}", flush=True)
    killed = json.loads((work / "rehearsal.json").read_text())
    apart = differences(alone["steps"], killed["steps"])
    report = {
        "format": 1,
        **files.origin(),
        "against": str(against),
        "kills": done,
        "commands": sum(line.kind == "run" for line in lines),
        "differences": apart,
    }
    files.write_json(out, report)
    print(f"{len(done)} kills; " + ("the same in the end" if not apart else "; ".join(apart)))
    return 1 if apart else 0


def differences(alone: list[dict[str, Any]], killed: list[dict[str, Any]]) -> list[str]:
    """Commands whose findings are not the same, those of the clock apart."""
    kept = {row["written"]: row.get("same") for row in alone}
    found = {row["written"]: row.get("same") for row in killed}
    return [written for written in {**kept, **found} if kept.get(written) != found.get(written)]


def _run(
    command: list[str], work: Path, seconds: dict[str, float], done: set[str]
) -> dict[str, Any] | None:
    """Begin the rehearsal and kill it in the first command that was not killed yet; which. None
    where it has come to its end."""
    start = time.time()
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            now = _now(work)
            if now and now["at"] >= start and now["written"] not in done:
                after = time.time() - now["at"]
                if after >= max(LEAST, SHARE * seconds.get(now["written"], 0.0)):
                    return {"written": now["written"], "after": round(after, 1)}
            time.sleep(LOOK)
    finally:
        _kill(process)
    if process.returncode:
        raise UserError(f"rehearsal: begun again it ended with exit code {process.returncode}")
    return None


def _now(work: Path) -> dict[str, Any] | None:
    """The command that was begun last; None where none was."""
    try:
        now: dict[str, Any] = json.loads((work / NOW).read_text())
    except (OSError, ValueError):
        return None
    return now


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A process and all that it has started, as a machine that is switched off."""
    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=30)
    process.wait()
