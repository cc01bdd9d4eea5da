"""Programs that train by turns on a shared machine: the one that has used the least CPU goes on,
the others stand still, so that a machine that slows down slows all of them.

A program's clock are its own CPU seconds since its first step; imports and compiling do not count,
saving its heads does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.scripts.common import files
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.lab.trainers.entries import Entry

TICKS = os.sysconf("SC_CLK_TCK")
POLL = 0.25  # seconds
PATIENCE = 600.0  # CPU seconds before a first step
IDLE = 120.0  # wall seconds of its turns in which a program does next to nothing
BUSY = 0.05  # CPU seconds per wall second that are more than that


@dataclass(frozen=True)
class Mark:
    """The newest head that was saved when a program had used `seconds`. tokens: read by it;
    made: CPU seconds when its step was done."""

    seconds: float
    step: int
    tokens: int
    made: float

    def json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "core_seconds": self.seconds,
            "step": self.step,
            "tokens": self.tokens,
            "made": round(self.made, 1),
        }


@dataclass
class Racer:
    """A program that runs. turns: (tokens, CPU seconds) of each of its turns. seen: (step, CPU
    seconds) as it was looked at. peak: KiB of resident memory at most; own: of it what no file
    backs, at most, as it was looked at. ended: why it stopped before the others, "" if it did
    not."""

    entry: Entry
    folder: Path
    process: subprocess.Popen[bytes]
    first: float | None = None
    used: float = 0.0
    peak: int = 0
    own: int = 0
    turns: list[tuple[int, float]] = field(default_factory=list)
    seen: list[tuple[int, float]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ended: str = ""
    looked: tuple[int, float] = (0, 0.0)
    idle: float = 0.0

    def look(self) -> None:
        """What it has done and used so far."""
        cpu, peak, own = usage(self.process.pid)
        self.peak, self.own = max(self.peak, peak), max(self.own, own)
        code = self.process.poll()
        if code is not None:
            self.ended = f"ended with exit code {code}; {last_line(self.folder / 'log')}"
            return
        curve = self.entry.curve(self.folder)
        if not curve:
            if cpu > PATIENCE:
                self.ended = f"no step in {PATIENCE:.0f} CPU seconds"
            return
        if self.first is None:
            self.first, self.looked = cpu, (curve[-1][1], 0.0)
        self.used = cpu - self.first
        self.seen.append((curve[-1][0], self.used))

    def turn_ends(self, wall: float, before: float) -> None:
        """Count what was done in this turn of so many wall seconds, at whose start it had used
        `before` CPU seconds."""
        cpu, _, _ = usage(self.process.pid)
        self.idle = 0.0 if cpu - before > BUSY * wall else self.idle + wall
        if self.idle >= IDLE and not self.ended:
            self.ended = f"did nothing for {IDLE:.0f} seconds; {last_line(self.folder / 'log')}"
        curve = self.entry.curve(self.folder)
        if self.first is None or not curve:
            return
        tokens, used = self.looked
        self.turns.append((curve[-1][1] - tokens, self.used - used))
        self.looked = (curve[-1][1], self.used)

    def mark(self, seconds: float) -> None:
        """Keep the newest saved head as that of `seconds`."""
        saved = self.entry.heads(self.folder)
        if not saved:
            return
        step = max(saved)
        shutil.copytree(saved[step], self.folder / "marks" / f"{seconds:g}", dirs_exist_ok=True)
        tokens = dict(self.entry.curve(self.folder)).get(step, 0)
        made = next((cpu for at, cpu in self.seen if at >= step), self.used)
        self.marks.append(Mark(seconds, step, tokens, made))

    def json(self) -> dict[str, Any]:
        """For the report."""
        curve = self.entry.curve(self.folder)
        return {
            "entry": self.entry.name,
            **(self.entry.facts(self.folder) if curve else {}),
            "core_seconds": round(self.used, 1),
            "steps": curve[-1][0] if curve else 0,
            "tokens": curve[-1][1] if curve else 0,
            "turns": [[tokens, round(used, 2)] for tokens, used in self.turns],
            "peak_memory_mb": self.peak // 1024,
            "peak_own_memory_mb": self.own // 1024,
            "marks": [mark.json() for mark in self.marks],
            "ended": self.ended,
        }


@dataclass(frozen=True)
class Rules:
    """seconds: CPU seconds of each program. marks: when its head is kept. turn: wall seconds of a
    turn. together: programs that go on at a time."""

    seconds: float
    marks: Sequence[float]
    turn: float
    together: int


def race(
    entries: Sequence[Entry],
    commands: Sequence[Sequence[str]],
    folders: Sequence[Path],
    rules: Rules,
    on_progress: OnProgress,
) -> list[dict[str, Any]]:
    """Run all commands by turns until each has used its seconds or ended by itself. What each
    wrote stays in its folder; none is left running, whatever stops this."""
    racers: list[Racer] = []
    try:
        for entry, command, folder in zip(entries, commands, folders, strict=True):
            racers.append(Racer(entry, folder, started(command, folder, entry.root)))
        while running := [r for r in racers if not r.ended and r.used < rules.seconds]:
            chosen = sorted(running, key=lambda r: usage(r.process.pid)[0])[: rules.together]
            take_turn(chosen, rules)
            for racer in chosen:
                for seconds in rules.marks[len(racer.marks) :]:
                    if racer.used < seconds or racer.ended:
                        break
                    racer.mark(seconds)
            done = sum(min(r.used, rules.seconds) if not r.ended else rules.seconds for r in racers)
            on_progress(int(done), int(rules.seconds * len(racers)), "CPU seconds")
        return [racer.json() for racer in racers]
    finally:
        for racer in racers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(racer.process.pid, signal.SIGKILL)
            racer.process.wait()


def take_turn(chosen: Sequence[Racer], rules: Rules) -> None:
    """Let them go on for a turn, or until one has used what is left of its seconds."""
    before = [usage(racer.process.pid)[0] for racer in chosen]
    for racer in chosen:
        send(racer, signal.SIGCONT)
    start = time.monotonic()
    while time.monotonic() < start + rules.turn:
        time.sleep(POLL)
        for racer in chosen:
            racer.look()
        if any(racer.ended or racer.used >= rules.seconds for racer in chosen):
            break
    wall = time.monotonic() - start
    for racer, used in zip(chosen, before, strict=True):
        send(racer, signal.SIGSTOP)
        if not racer.ended:
            racer.look()
        racer.turn_ends(wall, used)


def send(racer: Racer, number: int) -> None:
    """A signal to a program and what it started."""
    if racer.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(racer.process.pid, number)


def started(command: Sequence[str], folder: Path, root: Path) -> subprocess.Popen[bytes]:
    """The program, standing still, in the checkout `root`. It ends with this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if root != files.ROOT:
        environment["PYTHONPATH"] = str(root)  # before the package that is installed

    def with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=with_parent,
        )
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def usage(process: int) -> tuple[float, int, int]:
    """(CPU seconds; KiB of resident memory: the most so far, and what no file backs now) of a
    process; zeros where it is gone."""
    try:
        spent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0, 0
    sizes = {line.partition(":")[0]: line.split()[1] for line in status if line.endswith(" kB")}
    peak, own = (int(sizes.get(name, 0)) for name in ("VmHWM", "RssAnon"))
    return (int(spent[11]) + int(spent[12])) / TICKS, peak, own


def last_line(log: Path) -> str:
    """What a program said last, or that it said nothing."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return text.splitlines()[-1].strip()[:200] if text else "it said nothing"
