"""What is said of files and folders that a configuration names and that are not there."""

from __future__ import annotations

from pathlib import Path


def no_file(key: str, path: str, fix: str) -> list[str]:
    """A line about `key` where there is no file at `path`."""
    found = Path(path).expanduser().is_file()
    return [] if found else [f"{key}: no such file {path}; {fix}"]


def no_folder(key: str, path: str, fix: str) -> list[str]:
    """A line about `key` where there is no folder at `path`."""
    found = Path(path).expanduser().is_dir()
    return [] if found else [f"{key}: no such folder {path}; {fix}"]


def neither(key: str, path: str, fix: str) -> list[str]:
    """A line about `key` where there is neither a file nor a folder at `path`."""
    found = Path(path).expanduser().exists()
    return [] if found else [f"{key}: no such file or folder {path}; {fix}"]
