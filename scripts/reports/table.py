"""A table of text, and how it is shown: on a terminal, and in HTML by the macro `table` of
templates/parts.html. Also how figures are written in its cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.console import Console
from rich.text import Text

Columns = Sequence[tuple[str, Callable[[dict[str, Any]], str]]]
WIDE = 150  # characters of a line in a log file
WARNS = (
    "NOT",
    "IN DOUBT",
    "skipped",
)  # how a note begins that nobody should miss, as in parts.html
DOUBT = "✗"  # behind a figure that cannot be believed


@dataclass(frozen=True)
class Table:
    """Cells of text under the names of columns; names and values have no names of columns.

    title: what was measured, and how. notes: what its reader must know, a line each. words:
    columns that hold text and stand left, counted from either end; the others stand right.
    best: number of the row that is marked.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    words: Sequence[int] = (0,)
    best: int | None = None

    @classmethod
    def of(cls, columns: Columns, rows: Iterable[dict[str, Any]], **more: Any) -> Table:
        """Make a table of named columns, each a function row -> text."""
        cells = [[cell(row) for _, cell in columns] for row in rows]
        return cls([name for name, _ in columns], cells, **more)

    @classmethod
    def listed(cls, values: dict[str, Any]) -> Table:
        """Return names and values, without those that say nothing."""
        known = {name: value for name, value in values.items() if value not in (None, [], "")}
        rows = [[n, v if isinstance(v, str) else json.dumps(v)] for n, v in known.items()]
        return cls((), rows)

    @property
    def left(self) -> set[int]:
        """Numbers of the columns that hold text."""
        return {place % len(self.head) for place in self.words} if self.head else {0, 1}

    def show(self, console: Console | None = None) -> None:
        """Print it with title and notes."""
        console = console or Console()
        if not console.is_terminal:  # a log file has no width
            console = Console(width=WIDE, file=console.file)
        if self.title:  # a line of its own: rich would fold it to the table's width
            _say(console, self.title, "bold")
        drawn = rich.table.Table()
        if not self.head:
            drawn = rich.table.Table(box=None, show_header=False, pad_edge=False)
        for i, name in enumerate(self.head or ("", "")):
            drawn.add_column(name, justify="left" if i in self.left else "right", overflow="fold")
        for number, row in enumerate(self.rows):
            cells = list(row)
            if self.best is not None:
                cells[0] = ("▸ " if number == self.best else "  ") + cells[0]
            texts = [Text(cell, style="red" if cell.endswith(DOUBT) else "") for cell in cells]
            drawn.add_row(*texts, style="bold" if number == self.best else None)
        console.print(drawn)
        for line in self.notes:
            warns = "red" if line.startswith("IN DOUBT") else "yellow"
            _say(console, line, warns if line.startswith(WARNS) else "dim")


def _say(console: Console, line: str, style: str) -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def number(value: float | None, digits: int = 2) -> str:
    """1.83; a dash for nothing."""
    return "–" if value is None else f"{value:.{digits}f}"


def interval(cell: dict[str, Any] | None, digits: int = 2, unit: str = "") -> str:
    """1.83 [1.71, 1.95], without brackets where there is no interval."""
    if not cell or cell["mean"] is None:
        return "–"
    text = f"{cell['mean']:.{digits}f}{unit}"
    if cell["low"] is None or cell["low"] == cell["high"]:
        return text
    return f"{text} [{cell['low']:.{digits}f}, {cell['high']:.{digits}f}]"


def ratio(cell: dict[str, Any] | None, doubts: Sequence[str]) -> str:
    """1.83× [1.71, 1.95], marked where it is in doubt."""
    return interval(cell, 2, "×") + (f" {DOUBT}" if doubts else "")
