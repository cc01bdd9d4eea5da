"""What long work has found so far, kept until the work is through: the same command again
goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outrider.scripts.common import files
from outrider.scripts.common.progress import OnProgress, silent

Item = TypeVar("Item")


class Memo:
    """JSON values by name in `folder` (None: in memory alone), for as long as `key` stays.

    key: what the values depend on (settings, hashes), by name. Under another one than the
        folder was written with, it is emptied, and a line on stderr names what differs; so
        for a file that is damaged or not ours. resumed: there are values under this very
        key.

    One process at a time: who opens one holds the folder around it (`files.sole_writer`).
    """

    def __init__(self, folder: Path | None, key: dict[str, Any] | None = None) -> None:
        self.folder, self.memory = folder, dict[str, list[Any]]()
        self.resumed = False
        if folder is None:
            return
        stamp = {name: _sha256(value) for name, value in (key or {}).items()}
        try:
            known = dict(json.loads((folder / "key").read_bytes()))
        except (OSError, ValueError, TypeError):
            known = {}
        there = any(folder.glob("*.jsonl"))
        self.resumed = there and known == stamp
        if known == stamp:
            return
        if there:
            apart = [n for n in {**known, **stamp} if known.get(n) != stamp.get(n)]
            what = ", ".join(apart) if known else "version"
            _note(f"{folder} was made with another {what}; all is made anew")
        self.clear()
        files.write_text(folder / "key", json.dumps(stamp))

    def lines(self, name: str) -> list[Any]:
        """Return what was added under `name` so far. A last line that a crash cut short is
        dropped."""
        if self.folder is None:
            return list(self.memory.get(name, []))
        path = self.folder / f"{name}.jsonl"
        try:
            return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        except FileNotFoundError:
            return []
        except ValueError:
            _note(f"{path} is damaged; it is made again")
            path.unlink()
            return []

    def add(self, name: str, value: Any) -> None:
        """Append one JSON value to `name`."""
        if self.folder is None:
            self.memory.setdefault(name, []).append(value)
            return
        path = self.folder / f"{name}.jsonl"
        old = path.read_bytes() if path.exists() else b""
        if old and not old.endswith(b"\n"):
            files.write_bytes(path, old[: old.rfind(b"\n") + 1])
        with open(path, "a") as file:
            file.write(json.dumps(value) + "\n")

    def each(
        self,
        name: str,
        items: Sequence[Item],
        make: Callable[[Item], Any],
        on_progress: OnProgress = silent,
    ) -> list[Any]:
        """Return what `make` gives for every item, those that `name` lacks made now; each
        is kept as soon as it is there."""
        found = self.lines(name)
        for item in items[len(found) :]:
            on_progress(len(found), len(items))
            found.append(make(item))
            self.add(name, found[-1])
        on_progress(len(items), len(items))
        return found

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the value of `name`, made now unless it is there already."""
        if not self.lines(name):
            self.add(name, make())
        return self.lines(name)[0]

    def clear(self) -> None:
        """Forget everything: the result that it was for is written."""
        self.memory.clear()
        if self.folder is not None and self.folder.is_dir():
            for file in [*self.folder.glob("*.jsonl"), self.folder / "key"]:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something of the user's lies there
                self.folder.rmdir()


def _sha256(value: Any) -> str:
    """Return the sha256 of a value as JSON; paths and the like as text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _note(what: str) -> None:
    print(f"note: {what}", file=sys.stderr, flush=True)
