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
        key is emptied. resumed: there are parts under this very key. changed: where the key is
        a dict and there were parts under another one, the names whose values differ.
    """

    def __init__(self, folder: Path | None, key: Any = None) -> None:
        self.folder, self.memory = folder, dict[str, list[Any]]()
        self.resumed, self.changed = False, list[str]()
        if folder is None:
            return
        named = key if isinstance(key, dict) else {"key": key}
        stamp = {name: _sha256(value) for name, value in named.items()}
        mark, there = folder / "key", any(folder.glob("*.jsonl"))
        old = _stamp(mark)
        if old == stamp:
            self.resumed = there
            return
        if there:
            self.changed = [n for n in {**old, **stamp} if old.get(n) != stamp.get(n)]
        self.clear()
        files.write_text(mark, json.dumps(stamp))

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


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _stamp(mark: Path) -> dict[str, str]:
    """The hashes of the key that a folder was written under; {} where they cannot be read."""
    try:
        found = json.loads(mark.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
