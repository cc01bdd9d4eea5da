"""The commit that a figure was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit(*paths: str) -> str | None:
    """The commit of the repository that this code lies in, "+" appended when tracked files
    (those of `paths`, git pathspecs, or any) were changed; None outside git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()
