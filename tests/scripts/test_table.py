"""One table, three ways to show it."""

from __future__ import annotations

import io

from rich.console import Console

from outrider.scripts.reports.table import Table

ROWS = [["a [bold]", "1.40 [1.32, 1.50]", "x"], ["b", "2.00", "longer"]]
TABLE = Table(
    ("drafter", "length", "why"),
    ROWS,
    "what was measured",
    ["NOT LOSSLESS: a", "a note [red]"],
    words=(0, -1),
)


def test_a_log_has_no_width() -> None:
    file = io.StringIO()
    TABLE.show(Console(file=file, width=60))
    assert "1.40 [1.32, 1.50]" in file.getvalue() and "a [bold]" in file.getvalue()
