"""Packages with heads of their own, installed for a test: the one of docs/new-head.md, and broken
ones."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from outrider.conf.schema import CONF

PAGE = CONF.parent / "docs" / "new-head.md"
CODE, KEYS = "outrider_turn/__init__.py", "outrider_turn/conf/head/turn.yaml"


def blocks() -> dict[str, str]:
    """The page's blocks of code by language; those without one, one behind the other, are "sh"."""
    found: dict[str, str] = {}
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        found[language or "sh"] = found.get(language or "sh", "") + text
    return found


def point() -> str:
    """The page's entry point, as an installer writes it."""
    (line,) = re.findall(
        r'^\[project\.entry-points\."outrider\.heads"\]\n(.+)$', blocks()["toml"], re.M
    )
    return str(line).replace('"', "")


def write(
    site: Path,
    files: Mapping[str, str | None] | None = None,
    points: str | None = None,
    name: str = "outrider-turn",
) -> None:
    """Lay a package into the folder `site` as an installer does: the page's, with other `files`
    (None: left out) and other `points`."""
    given = {CODE: blocks()["python"], KEYS: blocks()["yaml"], **(files or {})}
    info = f"{name.replace('-', '_')}-0.1.dist-info"
    given[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n"
    given[f"{info}/entry_points.txt"] = (
        f"[outrider.heads]\n{point() if points is None else points}\n"
    )
    for place, text in given.items():
        if text is not None:
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            (site / place).write_text(text)


@contextlib.contextmanager
def installed(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Mapping[str, str | None] | None = None,
    points: str | None = None,
) -> Iterator[None]:
    """Within, the package lies on sys.path; behind it nothing of it is left."""
    write(site, files, points)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(site)])  # scripts exchange the first one
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for name in [n for n in sys.modules if n.partition(".")[0].startswith("outrider_turn")]:
                del sys.modules[name]
