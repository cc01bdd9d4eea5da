"""What long work has found so far, kept until the work is through: the same command again
goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from outrider.conf.jsonl import records
from outrider.scripts.common import files


class Memo:
    """JSON values by name, a line each of the file `path` (None: in memory alone), for as long as
    `key` stays.

    key: what the values depend on (settings, hashes), by name. A file under another one begins
        anew, and a line on stderr names what differs; a line that is damaged or that a crash cut
        short is left out. resumed: there are values under this very key.

    One process at a time: who opens one holds the folder around it (`files.sole_writer`).
    """

    def __init__(self, path: Path | None, key: dict[str, Any] | None = None) -> None:
        self.path, self.kept, self.resumed = path, list[dict[str, Any]](), False
        if path is None:
            return
        stamp = {name: _sha256(value) for name, value in (key or {}).items()}
        known, *kept = (records(path) if path.exists() else []) or [stamp]
        if known == stamp:
            self.kept = kept
        elif kept:
            names = sorted({*known, *stamp})
            apart = ", ".join(n for n in names if known.get(n) != stamp.get(n))
            print(f"note: {path} was made with another {apart}; all is made anew", file=sys.stderr)
        files.write_jsonl(path, [stamp, *self.kept])
        self.resumed = bool(self.kept)

    def lines(self, name: str) -> list[Any]:
        """Return what was added under `name` so far."""
        return [one["value"] for one in self.kept if one["name"] == name]

    def add(self, name: str, value: Any) -> None:
        """Append one JSON value to `name`."""
        self.kept.append({"name": name, "value": value})
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(self.kept[-1]) + "\n")

    def clear(self) -> None:
        """Forget everything: the result that it was for is written."""
        self.kept = []
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _sha256(value: Any) -> str:
    """Return the sha256 of a value as JSON; paths and the like as text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
