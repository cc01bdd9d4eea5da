"""One table, three ways to show it."""

from __future__ import annotations

import io

from rich.console import Console

from outrider.scripts.reports.table import Table, interval, number, ratio

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


def test_figures_in_cells() -> None:
    cell = {"mean": 1.834, "low": 1.7, "high": 1.95}
    assert interval(cell) == "1.83 [1.70, 1.95]" and interval(cell, 1, "×") == "1.8× [1.7, 1.9]"
    assert interval({**cell, "low": None}) == interval({**cell, "low": 2, "high": 2}) == "1.83"
    assert interval(None) == number(None) == "–" and number(2.345, 1) == "2.3"
    assert ratio(cell, ["it is wide"]) == "1.83× [1.70, 1.95] ✗"
