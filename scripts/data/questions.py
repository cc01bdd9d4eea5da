"""The questions of conversations that the target shall answer anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line, read_lines
from outrider.scripts.common.files import sha256
from outrider.scripts.common.prompts import requested, spoken
from outrider.train.data.rows import tools_of

# System and user turns of a conversation, and the tools that its row offers.
Question = tuple[list[dict[str, str]], list[Any] | None]


class Questions:
    """The conversations of a JSONL file without their answers.

    Forms: {"messages"} and ShareGPT {"conversations"} (system and user turns are kept),
    {"turns": [..]}, {"prompt"}; a row's "tools" are offered again.
    asked: (line, question) each. bad: (line, reason) of rows that cannot be asked. Raises
        UserError when the file cannot be read or asks nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad: list[tuple[int, str]] = []
        self.asked: list[tuple[int, Question]] = []
        for number, line in read_lines(path, "prompts"):
            try:
                row = parse_line(line)
                question = asked_of(*spoken(row)), tools_of(row.get("tools"))
                self.asked.append((number, question))
            except ValueError as error:
                self.bad.append((number, str(error)))
        self.sha256 = sha256(path)
        if not self.asked:
            first = f" ({path}:{self.bad[0][0]}: {self.bad[0][1]})" if self.bad else ""
            raise UserError(
                f"prompts: {path} holds no question{first}; give rows with messages, "
                "turns or prompt"
            )


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
