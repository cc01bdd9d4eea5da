"""The file that a synthesis writes: a row a line, each with the number of its question."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.disk import whole
from outrider.conf.errors import UserError
from outrider.scripts.common.files import json_line, write_json


class Ledger:
    """FILE, rows in the order in which they were answered until `finish` sorts them, and
    FILE.meta.json: the settings. numbers: questions whose rows are on file. tally:
    answers, and those that were cut.

    Continues what is there; a line that a kill cut short goes. Raises UserError: a foreign or
    damaged file, other settings (each is named)."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.meta = path.with_name(path.name + ".meta.json")
        self.numbers: set[int] = set()
        self.tally: Counter[str] = Counter()
        if not self.meta.exists():
            if path.exists():
                raise UserError(
                    f"out: {path} exists and was not written by this command; give another name"
                )
            return
        try:
            known, apart = dict(json.loads(self.meta.read_bytes())), []
            for key in {**known, **self.settings}:
                before, now = (str(found.get(key)) for found in (known, self.settings))
                if before != now:
                    apart.append(f"{key} {before[:40]}, now {now[:40]}")
            if not apart and path.exists():
                self._read()
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"out: {path} or {self.meta.name} was changed since it was written; delete both "
                "to start again"
            ) from None
        if apart:
            raise UserError(
                f"out: {path} was made with other settings ({'; '.join(apart)}); give another name"
            )

    def _read(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._count(json.loads(line))
                end += len(line)
        os.truncate(self.path, end)

    def _count(self, row: dict[str, Any]) -> None:
        self.numbers.add(int(row["line"]))
        self.tally["answers"] += sum(m["role"] == "assistant" for m in row["messages"])
        self.tally["cut"] += not row["complete"]

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows, in one piece. Raises OSError when the disk refuses."""
        if not self.meta.exists():  # first, so that no kill leaves a file without a record
            write_json(self.meta, self.settings)
        with self.path.open("ab") as file:
            file.write("".join(map(json_line, rows)).encode())
        for row in rows:
            self._count(row)

    def finish(self) -> None:
        """Bring the rows into the order of their questions: the file is the same however they
        came, and a seed then draws the same rows."""
        places, at = [], 0
        with self.path.open("rb") as file:
            for line in file:
                places.append((int(json.loads(line)["line"]), at))
                at += len(line)
            if places == sorted(places):
                return
            with whole(self.path) as stage, stage.open("wb") as out:
                for _, place in sorted(places):
                    file.seek(place)
                    out.write(file.readline())


def say(text: str) -> None:
    """A line of progress."""
    print(f"synthesize: {text}", file=sys.stderr, flush=True)
