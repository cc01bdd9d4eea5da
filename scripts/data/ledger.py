"""The file that a synthesis writes: a row a line, each with the number of its question."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.disk import whole
from outrider.conf.errors import UserError
from outrider.scripts.common.files import write_json


class Ledger:
    """FILE, rows in the order in which they were answered until `finish` sorts them, and
    FILE.meta.json beside it: the settings. numbers: questions whose rows are on file. tally:
    answers, and those that were cut.

    A line that a kill cut short goes on the next start."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.meta = path.with_name(path.name + ".meta.json")
        self.numbers: set[int] = set()
        self.tally: Counter[str] = Counter()

    def open(self) -> None:
        """Continue what is there. Raises UserError: a folder, a foreign or damaged file, other
        settings (each is named)."""
        path = self.path
        if path.is_dir():
            raise UserError(f"out: {path} is a folder; give a file such as {path / 'data.jsonl'}")
        if not self.meta.exists():
            if path.exists():
                raise UserError(
                    f"out: {path} exists and was not written by this command; give another name"
                )
            return
        try:
            wrong = differences(json.loads(self.meta.read_bytes()), self.settings)
            if not wrong and path.exists():
                self._read()
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"out: {path} or {self.meta.name} was changed since it was written; delete both "
                "to start again"
            ) from None
        if wrong:
            raise UserError(
                f"out: {path} was made with other settings ({'; '.join(wrong)}); give another name"
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


def json_line(row: dict[str, Any]) -> str:
    """Return one JSON line; letters stay readable, what some readers take for a line end
    does not."""
    text = json.dumps(row, ensure_ascii=False)
    return re.sub("[\x85\u2028\u2029]", lambda m: f"\\u{ord(m[0]):04x}", text) + "\n"


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Return every leaf in which two settings differ, as "key old, now new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in [*old, *(k for k in new if k not in old)]:
            found += differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    short = [
        v[:12] if isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) else v for v in (old, new)
    ]
    return [] if old == new else [f"{key} {short[0]}, now {short[1]}"]
