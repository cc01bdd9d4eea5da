"""Finished parts of a long run, kept until the run is through: the same command again goes on
where it was stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scripts.common import files

Work = TypeVar("Work")


class Parts:
    """JSON values by name in `folder` (None: in memory alone).

    key: what the parts depend on (settings, hashes). A folder that was written under another
        key is emptied.
    """

    def __init__(self, folder: Path | None, key: Any = None) -> None:
        self.folder, self.memory = folder, dict[str, list[Any]]()
        self.resumed = False
        if folder is None:
            return
        stamp = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        mark = folder / "key"
        if mark.is_file() and mark.read_text() == stamp:
            self.resumed = any(folder.glob("*.jsonl"))
            return
        self.clear()
        files.write_text(mark, stamp)

    def lines(self, name: str) -> list[Any]:
        """What was added under `name` so far. A last line that a crash cut short is dropped."""
        if self.folder is None:
            return list(self.memory.get(name, []))
        path = self.folder / f"{name}.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

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
        work: Sequence[Work],
        make: Callable[[Work], Any],
        watch: Callable[[int], None],
    ) -> list[Any]:
        """What `make` says of every piece of `work`, those that `name` lacks made now; each is
        kept as soon as it is there. watch(number of the piece that is next)."""
        found = self.lines(name)
        for number, piece in enumerate(work[len(found) :], len(found)):
            watch(number)
            found.append(make(piece))
            self.add(name, found[-1])
        return found

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of `name`, made now unless it is there already."""
        known = self.lines(name)
        if not known:
            self.add(name, make())
            known = self.lines(name)
        return known[0]

    def clear(self) -> None:
        """Forget everything: the result that the parts were for is written."""
        self.memory.clear()
        if self.folder is not None and self.folder.is_dir():
            for file in [*self.folder.glob("*.jsonl"), self.folder / "key"]:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something of the user's lies there
                self.folder.rmdir()
