"""The questions of conversations that the target shall answer anew: checked once, read from disk
when due.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line, read_places
from outrider.scripts.common.files import sha256
from outrider.scripts.common.prompts import requested, spoken
from outrider.train.data.rows import tools_of


class Questions:
    """The conversations of a JSONL file without their answers. Holds 16 bytes a row, not the
    text.

    Forms: {"messages"} and ShareGPT {"conversations"} (system and user turns are kept),
    {"turns": [..]}, {"prompt"}; a row's "tools" are offered again.
    bad: (line, reason) of rows that cannot be asked. Raises UserError when the file cannot be
        read or asks nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad: list[tuple[int, str]] = []
        self.starts, self.lines = array("q"), array("q")
        for number, at, line in read_places(path, "prompts"):
            try:
                question_of(line)
            except ValueError as error:
                self.bad.append((number, str(error)))
            else:
                self.starts.append(at)
                self.lines.append(number)
        self.sha256 = sha256(path)
        if not self.starts:
            first = f" ({path}:{self.bad[0][0]}: {self.bad[0][1]})" if self.bad else ""
            raise UserError(
                f"prompts: {path} holds no question{first}; give rows with messages, "
                "turns or prompt"
            )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, n: int) -> tuple[list[dict[str, str]], list[Any] | None]:
        """System and user turns of question n, and the tools that its row offers. Raises
        UserError when the file was changed meanwhile.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.starts[n])
                return question_of(file.readline())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path}:{self.lines[n]}: changed while it was read ({error}); start again"
            ) from None


class Invented:
    """Questions that a file does not hold: number -> text."""

    def __init__(self, path: Path) -> None:
        self.path, self.texts = path, dict[int, str]()
        self.bad: list[tuple[int, str]] = []
        self.lines: Sequence[int] = ()

    def __getitem__(self, n: int) -> tuple[list[dict[str, str]], list[Any] | None]:
        return [{"role": "user", "content": self.texts[n]}], None


def question_of(line: bytes) -> tuple[list[dict[str, str]], list[Any] | None]:
    """Return the system turn, if any, and the user turns of a row; the tools that it
    offers. Raises ValueError in a user's words."""
    row = parse_line(line)
    return asked_of(*spoken(row)), tools_of(row.get("tools"))


def asked_of(key: str, turns: list[tuple[Any, Any]]) -> list[dict[str, str]]:
    """Return what is asked of the turns that `spoken` found. Raises ValueError in a user's
    words."""
    if any(role in ("tool", "function") for role, _ in turns):
        raise ValueError("holds tool turns, whose results cannot be asked for again")
    kept = requested(key, turns, ("system", "user"))
    if any(message["role"] == "system" for message in kept[1:]):
        raise ValueError("a system turn may only stand first")
    return kept


def fingerprint(text: str) -> str:
    """Return what two questions share when they are the same question: case, punctuation
    and spacing do not count."""
    return " ".join(re.findall(r"\w+", text.casefold()))
