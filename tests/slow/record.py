"""tests/slow.json: for every slow test its last result, its seconds, the hash of what it imports
at that time, and hash, commit and date of its last green.

    "tests/a/test_b.py::test_c[d]": {"result": "green", "seconds": 3.1, "hash": "…",
                                     "green": {"hash": "…", "commit": "…", "date": "…"}}

result: green, red (twice in a row where it was tried twice) or skipped, which is neither and
leaves the last green as it was. `second_try`: the date on which only the second try was green.
Rows merge: who writes reads the file anew under a lock, so runs beside each other lose nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.conf.disk import write_text

Rows = dict[str, dict[str, Any]]
UNKNOWN = 30.0  # seconds that a test is taken for before it has run


class Record:
    """The rows of one file, by the test's id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Rows:
        """All rows; {} without a file."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    @contextlib.contextmanager
    def changing(self) -> Iterator[Rows]:
        """The rows to change in place; they are written when the block ends well."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path.parent, os.O_RDONLY)  # the folder: no lock file is left behind
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            rows = self.read()
            yield rows
            lines = (f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
            write_text(self.path, "{\n" + ",\n".join(lines) + "\n}\n")
        finally:
            os.close(handle)

    def keep(self, names: set[str]) -> None:
        """Drop the rows of tests that are no more."""
        if self.read().keys() - names:
            with self.changing() as rows:
                for name in rows.keys() - names:
                    del rows[name]


def seconds(row: dict[str, Any]) -> float:
    """What a test takes, from its last run that was none of skipping."""
    return float(row.get("seconds", 0 if row.get("result") == "skipped" else UNKNOWN))


def is_changed(row: dict[str, Any], hash: str) -> bool:
    """Whether a test has yet to be green, or to be skipped, with what it imports now."""
    if row.get("result") == "skipped" and row["hash"] == hash:
        return False
    return bool(row.get("green", {}).get("hash") != hash)


def merged(row: dict[str, Any], run: dict[str, Any], provenance: dict[str, str]) -> dict[str, Any]:
    """A test's row after a run of it. run: result, hash, seconds where it was not skipped."""
    row = {**row, **run}
    if run["result"] == "green":
        row["green"] = {"hash": run["hash"], **provenance}
    return row
