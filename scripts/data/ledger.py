"""A JSONL file that only grows, with a record of how far it is sound; what the files of
synthesis have in common."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common.files import write_json


class Ledger:
    """FILE, and FILE.meta.json beside it: the settings, the blocks that it grew by as [asked,
    got], how many bytes they make, their sha256, the questions that stayed without an answer as
    [line, reason], and what else is counted of the rows (tally).

    What a kill left behind the recorded bytes is cut off on the next start."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.meta = path.with_name(path.name + ".meta.json")
        self.blocks: list[list[int]] = []
        self.failed: list[list[Any]] = []
        self.tally: Counter[str] = Counter()
        self.bytes = 0
        self.digest = hashlib.sha256()

    @property
    def settled(self) -> int:
        """Questions that are done with, answered or not."""
        return sum(requested for requested, _ in self.blocks)

    @property
    def rows(self) -> int:
        """Rows on file."""
        return sum(got for _, got in self.blocks)

    def open(self) -> None:
        """Continue what is there. Raises UserError: other settings (each is named), a foreign
        or damaged file.
        """
        if (record := read_record(self.path, self.meta, self.settings)) is None:
            return
        try:
            self.blocks = [[int(requested), int(got)] for requested, got in record["blocks"]]
            self.failed = [[int(line), str(reason)] for line, reason in record["failed"]]
            self.tally = Counter({str(k): int(n) for k, n in record["tally"].items()})
            recorded = record["bytes"], record["sha256"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(self.path, self.meta) from error
        self.path.touch()
        found = self._read()
        if found < self.rows or recorded != self._now():
            raise UserError(
                f"out: {self.path} was changed since it was written; delete it and "
                f"{self.meta.name} to start again"
            )
        os.truncate(self.path, self.bytes)

    def _read(self) -> int:
        """Count and hash the lines that the blocks make; how many of them there are."""
        self.bytes, self.digest, found = 0, hashlib.sha256(), 0
        with self.path.open("rb") as file:
            for line in itertools.islice(file, self.rows):
                self.digest.update(line)
                self.bytes, found = self.bytes + len(line), found + 1
        return found

    def _now(self) -> tuple[int, str]:
        return self.bytes, self.digest.hexdigest()

    def shorten(self, batch: int) -> None:
        """Forget a last block of fewer than `batch` questions: a larger run fills it."""
        if self.blocks and self.blocks[-1][0] < batch:
            self.blocks.pop()
            self._read()
            self._record()
            os.truncate(self.path, self.bytes)

    def append(
        self,
        rows: Sequence[dict[str, Any]],
        requested: int,
        failed: Sequence[list[Any]] = (),
        goes_on: bool = False,
    ) -> None:
        """Add the rows of so many further questions, as a block or to the last one (goes_on).
        Raises OSError; the record is the old one then."""
        data = "".join(map(json_line, rows)).encode()
        if not self.meta.exists():  # first, so that no kill leaves a file without a record
            self._record()
        with self.path.open("ab") as file:
            file.truncate(self.bytes)  # an append that failed may have left a part
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.digest.update(data)
        self.bytes += len(data)
        if not (goes_on and self.blocks):
            self.blocks.append([0, 0])
        last = self.blocks[-1]
        last[:] = last[0] + requested, last[1] + len(rows)
        self.failed += failed
        self._record()

    def _record(self) -> None:
        size, digest = self._now()
        record = {"settings": self.settings, "blocks": self.blocks, "bytes": size}
        record |= {"sha256": digest, "failed": self.failed, "tally": dict(self.tally)}
        write_json(self.meta, record)


def say(text: str) -> None:
    """A line of progress."""
    print(f"synthesize: {text}", file=sys.stderr, flush=True)


def json_line(row: dict[str, Any]) -> str:
    """One JSON line; letters stay readable, what some readers take for a line end does not."""
    text = json.dumps(row, ensure_ascii=False)
    return re.sub("[\x85\u2028\u2029]", lambda m: f"\\u{ord(m[0]):04x}", text) + "\n"


def read_record(path: Path, meta: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What `meta` tells of `path`; None where there is neither. Raises UserError: a folder, a
    file without a record, a damaged record, or one of other settings (each is named)."""
    if path.is_dir():
        raise UserError(f"out: {path} is a folder; give a file name such as {path / 'data.jsonl'}")
    if not meta.exists():
        if path.exists():
            raise UserError(
                f"out: {path} exists and was not written by this command; give another name"
            )
        return None
    try:
        record: dict[str, Any] = json.loads(meta.read_text(encoding="utf-8"))
        wrong = differences(record["settings"], settings)
    except (ValueError, KeyError, TypeError) as e:
        raise damaged(path, meta) from e
    if wrong:
        raise UserError(
            f"out: {path} was made with other settings ({'; '.join(wrong)}); give another name"
        )
    return record


def damaged(path: Path, meta: Path) -> UserError:
    """The error of a record that cannot be read."""
    return UserError(f"out: {meta} is damaged; delete it and {path} to start again")


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Every leaf in which two settings differ, as "key old, now new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in [*old, *(k for k in new if k not in old)]:
            found += differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    short = [
        v[:12] if isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) else v for v in (old, new)
    ]
    return [] if old == new else [f"{key} {short[0]}, now {short[1]}"]
