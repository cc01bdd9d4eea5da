"""What scripts write into pages: the part between two lines that stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.scripts.common import files


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
