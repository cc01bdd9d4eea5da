"""The commands of a rehearsal, one after the other: what is done is not done again, and a server
runs while commands ask it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common.memo import Memo, sha256
from outrider.scripts.lab.rehearsing import engine, kills, stand_ins
from outrider.scripts.lab.rehearsing.found import found
from outrider.scripts.lab.rehearsing.stand_ins import Line


class Walk:
    """The commands, one after the other. python: of llama.cpp's environment. threads: of its
    server. env: of every command."""

    def __init__(
        self,
        work: Path,
        exit_codes: dict[str, list[int]],
        python: Path,
        threads: int,
        env: dict[str, str],
    ) -> None:
        self.work, self.exit_codes, self.env = work, exit_codes, env
        self.python, self.threads = python, threads
        self.version = ""
        self.serve: Line | None = None  # the server that commands ask from here on
        self.up = contextlib.ExitStack()
        self.url = ""  # where it listens; "" while it does not run

    def through(
        self, lines: list[Line], on_rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None
    ) -> list[dict[str, Any]]:
        """What became of every command that is run. on_rows: sees those that are done, after each.
        Raises UserError for one that failed."""
        rows, before = list[dict[str, Any]](), ""
        with self.up:
            for line in lines:
                if line.kind == "left out":
                    continue
                before = sha256([before, line.key])
                if line.kind == "serve":
                    self._stop()
                    self.serve = line
                    continue
                memo = Memo(self.work / "steps" / f"{len(rows):02}-{line.number}", {"to": before})
                rows.append(memo.once("done", lambda line=line: self._done(line)))  # type: ignore[misc]
                on_rows(rows)
        return rows

    def _done(self, line: Line) -> dict[str, Any]:
        """Run a command; its row."""
        print(f"{line.number} {line.title}\n   {line.written}", flush=True)
        with self._asking(line) as words:
            kills.begun(self.work, line)
            began = time.monotonic()
            code = subprocess.call(stand_ins.command(words, sys.executable), env=self.env)
            seconds = time.monotonic() - began
        if code not in (0, *self.exit_codes.get(line.number, [])):
            raise UserError(
                f"rehearsal: {line.number}: `{' '.join(words)}` ended with exit code {code}; see "
                "its message above"
            )
        row = {"step": line.number, "title": line.title, "written": line.written}
        return row | {
            "run": " ".join(line.words),
            "seconds": round(seconds, 1),
            "exit_code": code,
            "engine": self.version if self.url else "",
            **found(words),
        }

    @contextlib.contextmanager
    def _asking(self, line: Line) -> Iterator[tuple[str, ...]]:
        """The words of a command, the page's address of a server being where it really listens."""
        address = engine.address(self.serve.words) if self.serve is not None else ""
        if not address or not any(address in word for word in line.words):
            self._stop()
            yield line.words
            return
        if not self.url:
            assert self.serve is not None
            print(f"   asks: {self.serve.written}", flush=True)
            one = engine.running(self.serve.words, self.python, self.work, self.threads)
            running = self.up.enter_context(one)
            self.url, self.version = running.url, running.version
        yield tuple(word.replace(address, self.url) for word in line.words)

    def _stop(self) -> None:
        """End the server that runs."""
        self.up.close()
        self.url = ""
