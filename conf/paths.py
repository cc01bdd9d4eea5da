"""Files, folders and models that a configuration names."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME of a model hub


def model(name: str) -> tuple[str, str] | None:
    """(option, key) of `target` that stand for a model named in place of an option: ("local",
    "path") for a folder, ("hub", "name") for OWNER/NAME; None for neither."""
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        return "local", "path"
    return ("hub", "name") if REPOSITORY.fullmatch(name) else None


def missing(key: str, path: str, fix: str, kind: str = "file") -> list[str]:
    """Return a line about `key` where `path` is no file, no folder, or neither ("file or
    folder"), as `kind` says."""
    found = Path(path).expanduser()
    there = {"file": found.is_file, "folder": found.is_dir, "file or folder": found.exists}
    return [] if there[kind]() else [f"{key}: no such {kind} {path}; {fix}"]
