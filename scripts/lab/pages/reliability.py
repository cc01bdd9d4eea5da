"""The reliability figures: docs/results/reliability.json, one row for each figure, and the table
of them in docs/reliability.md.

A slow test measures something and calls

    record("kill9", what="kill -9 at random points of saving and stepping, then resume",
           result="50/50 resume, final weights bitwise equal", met=good == 50, trials=50,
           good=good)

once, *before* it asserts, so that a missed figure is written down too. Rows are keyed by name
and merge: a row that was measured again replaces the old one and no other, also when several
test processes record at once. Each row carries its own commit, date, command and machine. Fast
tests record nothing: their share is too small to be a figure.

Rows go to the file that $OUTRIDER_RELIABILITY names, as `make slow` has it, and else to a scratch
file: a test writes nothing into the tree that it runs in. `python -m
scripts.lab.pages.reliability` puts the table into the page; `make slow` and `make readme` call it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.scripts.common import files
from outrider.scripts.reports.block import Block
from outrider.scripts.reports.table import Table

RESULTS = files.ROOT / "docs" / "results" / "reliability.json"
BLOCK = Block.of("docs/reliability.md", "reliability", "`make slow`")
PACKAGES = ("torch", "transformers", "accelerate")
CODE = (":!docs", ":!*.md")  # pages and results are no code: git pathspecs


def record(name: str, *, what: str, result: str, met: bool, **figures: Any) -> None:
    """Write or replace the row `name`.

    what: what was done, for the first column of the table. result: what came of it, for the
    second. met: whether it reached the bar. figures: whatever else should be kept, as JSON
    (trials, limits, seeds, seconds).
    """
    row = {"what": what, "result": result, "met": met, **figures, **_provenance()}
    with _held(path := _path()):
        rows = read(path)
        rows[name] = row
        files.write_json(path, dict(sorted(rows.items())))


def read(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Rows by name; {} without a file."""
    path = path or _path()
    return json.loads(path.read_text()) if path.exists() else {}


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """The table: what was done, what came of it, when and at which commit."""
    lines = [
        [
            r["what"],
            r["result"] + ("" if r["met"] else " (**missed**)"),
            r["date"],
            f"`{r['commit']}`",
        ]
        for _, r in sorted(rows.items())
    ]
    return Table(("fault or change", "result", "date", "commit"), lines, words=range(4))


def _path() -> Path:
    scratch = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}" / RESULTS.name
    return Path(os.environ.get("OUTRIDER_RELIABILITY") or scratch)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """One writer at a time; the folder itself is the lock, so none is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _provenance() -> dict[str, str]:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    command = f"python -m pytest -m slow {test.partition('[')[0]}" if test else files.command()
    machine = [
        files.processor(),
        f"{os.cpu_count()} CPUs",
        f"python {platform.python_version()}",
        *(f"{p} {version(p)}" for p in PACKAGES),
    ]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": files.commit(*CODE),
        "command": command,
        "machine": ", ".join(machine),
    }


def main() -> int:
    """Put the table into the page."""
    BLOCK.write(table(read(RESULTS)).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
