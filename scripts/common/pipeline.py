"""A job of several steps, each done once: the same command again goes on where it was stopped, and
the seconds that every step took are kept."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.conf.errors import Interrupted, UserError
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo, sha256

STOPPED = (130, 75, -2, -15)  # exit codes of a command that goes on when it is given again


@dataclass(frozen=True)
class Command:
    """A script with its keys, the files it reads and the file that it leaves when it is done."""

    title: str
    argv: list[str]
    reads: list[Path]
    leaves: Path

    @property
    def line(self) -> str:
        """As the user would type it: without a clone there are no scripts, but `outrider`."""
        if files.in_clone():
            return shlex.join(["python", *self.argv])
        script = Path(self.argv[0])
        verb = ["train", script.stem] if script.parts[0] == "train" else [script.stem]
        return shlex.join(["outrider", *verb, *self.argv[1:]])


class Pipeline:
    """The steps of a job. name: stands before its messages. folder: what is done is kept in
    FOLDER/steps, for as long as a command and the content of what it reads stay the same."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def run(self, commands: Iterable[Command]) -> None:
        """Run those that are not done yet, as the user would.

        Raises UserError where one fails (its own messages have said why), and Interrupted where
        it was stopped.
        """
        for number, command in enumerate(commands, 1):
            memo = self._memo(command)
            done = any(row["done"] for row in memo.lines("runs")[-1:])
            if done and command.leaves.exists():
                print(f"{number}. {command.title}: done already ({command.leaves})", flush=True)
                continue
            if done:  # what it has left is gone
                memo.clear()
                memo = self._memo(command)
            print(f"{number}. {command.title}\n   {command.line}", flush=True)
            self._run(command, memo)

    def spent(self, command: Command) -> dict[str, float]:
        """Seconds of a command and of the processors in its process, over all its runs; one that
        was stopped counts. peak_bytes: its largest resident memory, which Linux begins to count
        at that of the process that starts it; 0 before it has run."""
        rows = self._memo(command).lines("runs")
        seconds = {key: round(sum(r[key] for r in rows), 3) for key in ("seconds", "cpu_seconds")}
        return {**seconds, "peak_bytes": max((row["peak_bytes"] for row in rows), default=0)}

    def _memo(self, command: Command) -> Memo:
        name = "-".join(command.leaves.parts[-3:-1])
        name += f"-{sha256(str(command.leaves))[:8]}"
        reads = {str(path): files.sha256(path) for path in command.reads if path.exists()}
        return Memo(self.folder / "steps" / name, {"command": command.argv, **reads})

    def _run(self, command: Command, memo: Memo) -> None:
        """Run it to its end, and note what it took."""
        script = files.here(Path(command.argv[0]))  # a job may run from any folder
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, str(script), *command.argv[1:]])
        try:
            code, used = _ended(process)
        except BaseException:
            process.terminate()  # it saves what it has
            code, used = _ended(process)
            raise
        finally:
            unit = 1 if sys.platform == "darwin" else 1024
            row = {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": used.ru_utime + used.ru_stime,
                "peak_bytes": used.ru_maxrss * unit,
                "done": code == 0 and command.leaves.exists(),
            }
            memo.add("runs", row)
        if code in STOPPED:
            raise Interrupted(f"{self.name}: stopped; the same command goes on from here")
        if code:
            raise UserError(
                f"{self.name}: `{command.line}` ended with exit code {code}; see its message above"
            )
        if not row["done"]:
            raise UserError(
                f"{self.name}: {command.leaves} is missing after its step; remove {self.folder} "
                "and start again"
            )


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, resource.struct_rusage]:
    """Exit code of a process at its end, and what it and those that it started have used."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used
