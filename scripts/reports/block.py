"""What scripts write into pages: the part between two lines that stay where they are, and tables
in Markdown; the same tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.common import files

Columns = Sequence[tuple[str, Callable[[dict[str, Any]], str]]]


@dataclass(frozen=True)
class Block:
    """page: a Markdown file. first, last: the lines around what is written into it."""

    page: Path
    first: str
    last: str

    @classmethod
    def of(cls, page: str, name: str, by: str) -> Block:
        """What the command `by` writes into `page` of the repository, under a name."""
        return cls(
            files.ROOT / page, f"<!-- {name}: written by {by} -->", f"<!-- end of {name} -->"
        )

    def put(self, text: str, body: str) -> str:
        """`text` of the page with `body` as the block. Raises ValueError when a line is missing."""
        head, begin, rest = text.partition(self.first)
        _, end, tail = rest.partition(self.last)
        if not begin or not end:
            raise ValueError(f"{self.page.name}: needs the lines {self.first} and {self.last}")
        return f"{head}{begin}\n\n{body.strip()}\n\n{end}{tail}"

    def write(self, body: str) -> None:
        """Put `body` into the page. Raises ValueError when a line is missing."""
        files.write_text(self.page, self.put(self.page.read_text(), body))


def md_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)
) -> str:
    """A table in Markdown without a line end. words: the columns that hold text and stand left,
    counted from either end; the others stand right."""
    left = {place % len(head) for place in words}
    rule = "|".join("---" if place in left else "---:" for place in range(len(head)))
    return "\n".join([_line(head), f"|{rule}|", *map(_line, rows)])


def md_of(columns: Columns, rows: Iterable[dict[str, Any]], words: Sequence[int] = (0,)) -> str:
    """The same of named columns, each a function row -> text."""
    cells = ([cell(row) for _, cell in columns] for row in rows)
    return md_table([name for name, _ in columns], cells, words)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown_table(title: str, head: Sequence[str]) -> Table:
    """An empty table for a terminal: the first column stands left, the others right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table
