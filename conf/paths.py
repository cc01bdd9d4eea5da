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


def no_file(key: str, path: str, fix: str) -> list[str]:
    """Return a line about `key` where there is no file at `path`."""
    found = Path(path).expanduser().is_file()
    return [] if found else [f"{key}: no such file {path}; {fix}"]


def no_folder(key: str, path: str, fix: str) -> list[str]:
    """Return a line about `key` where there is no folder at `path`."""
    found = Path(path).expanduser().is_dir()
    return [] if found else [f"{key}: no such folder {path}; {fix}"]


def neither(key: str, path: str, fix: str) -> list[str]:
    """Return a line about `key` where there is neither a file nor a folder at `path`."""
    found = Path(path).expanduser().exists()
    return [] if found else [f"{key}: no such file or folder {path}; {fix}"]
