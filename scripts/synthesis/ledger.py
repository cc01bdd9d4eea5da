"""A JSONL file that only grows, with a record of how far it is sound: for data too large to be
rewritten block by block."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from conf.errors import UserError
from scripts.common.files import write_json
from scripts.synthesis.write import damaged, json_line, read_record


class Ledger:
    """FILE, and FILE.meta.json beside it: the settings, how many questions are settled, how
    many rows and bytes that makes, their sha256, and the questions that stayed without an
    answer as [line, reason].

    What a kill left behind the recorded bytes is cut off on the next start."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.meta, self.settings = (
            path,
            path.with_name(path.name + ".meta.json"),
            settings,
        )
        self.settled = self.bytes = self.rows = 0
        self.failed: list[list[Any]] = []
        self.digest = hashlib.sha256()

    def open(self) -> None:
        """Continue what is there. Raises UserError: other settings (each is named), a foreign
        or damaged file.
        """
        if (record := read_record(self.path, self.meta, self.settings)) is None:
            return
        try:
            self.settled, self.bytes, self.rows = (
                int(record[k]) for k in ("settled", "bytes", "rows")
            )
            self.failed = [[int(line), str(reason)] for line, reason in record["failed"]]
            wanted = str(record["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(self.path, self.meta) from error
        self._verify(wanted)

    def _verify(self, wanted: str) -> None:
        self.path.touch()
        with self.path.open("r+b") as file:
            left = self.bytes
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                self.digest.update(part)
                left -= len(part)
            if left or self.digest.hexdigest() != wanted:
                raise UserError(
                    f"out: {self.path} was changed since it was written; delete it and "
                    f"{self.meta.name} to "
                    "start again"
                )
            file.truncate(self.bytes)

    def append(self, rows: list[dict[str, Any]], failed: list[list[Any]], settled: int) -> None:
        """Add rows; the first `settled` questions are done with now. Raises OSError; the
        record is the old one then.
        """
        data = "".join(map(json_line, rows)).encode()
        if not self.meta.exists():  # first, so that no kill leaves a file without a record
            self._record()
        with self.path.open("ab") as file:
            file.truncate(self.bytes)  # an append that failed may have left a part
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.digest.update(data)
        self.bytes, self.rows, self.settled = self.bytes + len(data), self.rows + len(rows), settled
        self.failed += failed
        self._record()

    def _record(self) -> None:
        record = {
            "settings": self.settings,
            "settled": self.settled,
            "rows": self.rows,
            "bytes": self.bytes,
        }
        write_json(self.meta, {**record, "sha256": self.digest.hexdigest(), "failed": self.failed})
