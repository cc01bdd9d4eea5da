"""A job of several steps, each done once: the same command again goes on where it was stopped, and
the seconds that every step took are kept."""

from __future__ import annotations

import contextlib
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf.errors import Interrupted, UserError
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo, sha256

STOPPED = (130, 75, -2, -15)  # exit codes of a command that goes on when it is given again
LAUNCH = Path("conf/launch/ddp.yaml")  # how several processes of one command are started


@dataclass(frozen=True)
class Command:
    """A script with its keys, the files it reads and the file that it leaves when it is done.
    good: the exit codes with which it has done its work. processes: how many work on it, started
    by `accelerate launch` where they are several."""

    title: str
    argv: list[str]
    reads: list[Path]
    leaves: Path
    good: Collection[int] = (0,)
    processes: int = 1

    @property
    def ranks(self) -> list[str]:
        """Keys of a launch with these processes."""
        return ["--config_file", str(files.here(LAUNCH)), "--num_processes", str(self.processes)]

    @property
    def line(self) -> str:
        """As the user would type it: without a clone there are no scripts, but `outrider`."""
        if not files.in_clone():
            script = Path(self.argv[0])
            verb = ["train", script.stem] if script.parts[0] == "train" else [script.stem]
            ranks = ["--launch", str(self.processes)] if self.processes > 1 else []
            return shlex.join(["outrider", *verb, *self.argv[1:], *ranks])
        launch = ["accelerate", "launch", *self.ranks] if self.processes > 1 else ["python"]
        return shlex.join([*launch, *self.argv])


class Deadline:
    """When work stops. minutes: from now; 0 = never. name: of who says so."""

    def __init__(self, minutes: float, name: str) -> None:
        self.name = name
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")

    def left(self) -> float | None:
        """Seconds until then, None where it never comes. Raises Interrupted where it is past."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise self.stopped(75)
        return None if left == float("inf") else left

    def stopped(self, code: int = 130) -> Interrupted:
        """What is raised where the work stops."""
        return Interrupted(f"{self.name}: stopped; the same command goes on from here", code)


class Pipeline:
    """The steps of a job. name: stands before its messages. folder: what is done is kept in
    FOLDER/steps, for as long as a command and the content of what it reads stay the same.
    minutes: after which the step at work is stopped as by SIGTERM; 0 = never."""

    def __init__(self, name: str, folder: Path, minutes: float = 0) -> None:
        self.name, self.folder = name, folder
        self.end = Deadline(minutes, name)
        self.seconds: dict[str, float] = {}  # of every step in this process, by its name

    def run(
        self,
        commands: Iterable[Command],
        on_done: Callable[[Command], None] = lambda command: None,
    ) -> None:
        """Run those that are not done yet, as the user would. on_done: sees those that are.

        Raises UserError where one fails (its own messages have said why), and Interrupted where
        it was stopped.
        """
        for number, command in enumerate(commands, 1):
            memo, there = self._memo(command), command.leaves.exists()
            if there and _value(memo):
                print(f"{number}. {command.title}: done already ({command.leaves})", flush=True)
                on_done(command)
                continue
            if _value(memo):  # what it has left is gone
                memo.clear()
                memo = self._memo(command)
            self.end.left()
            print(f"{number}. {command.title}\n   {command.line}", flush=True)
            with _timed(memo) as row:
                row["value"] = [self._call(command)]

    def once(self, name: str, title: str, make: Callable[[], Any]) -> Any:
        """The JSON value of a step in this process: kept under its name, or made now."""
        memo = Memo(self.folder / "steps" / name)
        if not _value(memo):
            print(f"{self.name}: {title}", flush=True)
            with _timed(memo) as row:
                row["value"] = [make()]
        self.seconds[name] = _spent(memo)["seconds"]
        return _value(memo)[0]

    def spent(self, command: Command) -> dict[str, float]:
        """Seconds of a command and of the processors in its processes, over all its runs; one
        that was stopped counts. peak_bytes: resident memory of the largest process that had
        ended by then of those that a sitting started, 0 where nobody knows it."""
        return _spent(self._memo(command))

    def _memo(self, command: Command) -> Memo:
        name = "-".join(command.leaves.parts[-3:-1])
        name += f"-{sha256(str(command.leaves))[:8]}"
        reads = {str(path): files.sha256(path) for path in command.reads if path.exists()}
        return Memo(self.folder / "steps" / name, {"command": command.argv, **reads})

    def _call(self, command: Command) -> int:
        """Exit code of a command that has done its work."""
        script = files.here(Path(command.argv[0]))  # a job may run from any folder
        launch = []
        if command.processes > 1:
            launch = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
            launch += command.ranks
        argv = [sys.executable, *launch, str(script), *command.argv[1:]]
        try:
            code = _ended(argv, self.end.left())
        except subprocess.TimeoutExpired:
            raise self.end.stopped(75) from None
        if code in STOPPED:
            raise self.end.stopped()
        if code not in command.good:
            raise UserError(
                f"{self.name}: `{command.line}` ended with exit code {code}; see its message above"
            )
        if not command.leaves.exists():
            raise UserError(
                f"{self.name}: {command.leaves} is missing after its step; remove {self.folder} "
                "and start again"
            )
        return code


def _ended(argv: list[str], seconds: float | None) -> int:
    """Exit code of a process. Raises TimeoutExpired where it had to be stopped, when it has
    saved what it had."""
    with subprocess.Popen(argv) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            raise
        except BaseException:
            process.kill()
            raise


def _value(memo: Memo) -> list[Any]:
    """[what the last run of a step has given]; [] where it has not come to its end."""
    return next((row["value"] for row in memo.lines("runs")[-1:]), [])


def _spent(memo: Memo) -> dict[str, float]:
    rows = memo.lines("runs")
    seconds = {key: round(sum(r[key] for r in rows), 3) for key in ("seconds", "cpu_seconds")}
    return {**seconds, "peak_bytes": max((r.get("peak_bytes") or 0 for r in rows), default=0)}


@contextlib.contextmanager
def _timed(memo: Memo) -> Iterator[dict[str, Any]]:
    """Note a run of a step and its seconds, also where it is stopped."""
    row: dict[str, Any] = {"value": []}
    began, before = time.perf_counter(), _processors()
    try:
        yield row
    finally:
        row["seconds"] = time.perf_counter() - began
        row["cpu_seconds"] = _processors() - before
        unit = 1 if sys.platform == "darwin" else 1024
        row["peak_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
        memo.add("runs", row)


def _processors() -> float:
    """Seconds of this process and of those that it has started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
