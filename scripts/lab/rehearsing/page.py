"""The commands of docs/path.md, step by step, as they stand there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.scripts.common import files

PAGE = files.ROOT / "docs" / "path.md"
BEGIN = "0"  # the number of what stands before the first numbered step
STEP = re.compile(r"^#{1,3} (?:([A-Z]\d+)\. )?(.+)$")
FENCE = "```"


@dataclass(frozen=True)
class PageStep:
    """A numbered step. lines: its commands, one string each, continuation lines joined."""

    number: str
    title: str
    lines: tuple[str, ...]


def steps(page: Path = PAGE) -> list[PageStep]:
    """Every part of the page that holds commands, in its order. A fence with a word behind it
    shows what is printed and holds no command. Raises ValueError for a fence that is not
    closed."""
    number, title, found = BEGIN, "", list[PageStep]()
    block: list[str] | None = None
    commands: list[str] = []
    for line in [*page.read_text().splitlines(), "## end"]:
        if line.startswith(FENCE):
            shown = line != FENCE  # opens a block of another kind
            if block is None:
                block = [FENCE] if shown else []
            else:
                commands += [] if block[:1] == [FENCE] else _joined(block)
                block = None
        elif block is not None:
            block.append(line)
        elif heading := STEP.match(line):
            if commands:
                found.append(PageStep(number, title, tuple(commands)))
            number, title, commands = heading[1] or BEGIN, heading[2], []
    if block is not None:
        raise ValueError(f"{page.name}: a block that begins with {FENCE} is not closed")
    return found


def _joined(block: list[str]) -> list[str]:
    """Commands of a block: a backslash at the end of a line goes on with the next one."""
    text = re.sub(r"\s*\\\n\s*", " ", "\n".join(block))
    return [line.strip() for line in text.splitlines() if line.strip()]
