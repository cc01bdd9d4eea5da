"""The questions of conversations that a server's model shall answer anew: checked once, read
from disk when due.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

from conf.errors import UserError
from conf.jsonl import is_whole, parse_line


class Questions:
    """The conversations of a JSONL file without their answers. Holds 16 bytes a row, not the
    text.

    Forms: {"messages"} and ShareGPT {"conversations"} (system and user turns are kept),
    {"turns": [..]}, {"prompt"}.
    bad: (line, reason) of rows that cannot be asked. Raises UserError when the file cannot be
        read or asks nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad: list[tuple[int, str]] = []
        self.starts, self.lines = array("q"), array("q")
        digest, at = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    self._add(number, at, line)
                    at += len(line)
        except OSError as error:
            raise UserError(
                f"prompts: cannot read {path} ({error.strerror}); give a JSONL file"
            ) from None
        self.sha256 = digest.hexdigest()
        if not self.starts:
            first = f" ({path}:{self.bad[0][0]}: {self.bad[0][1]})" if self.bad else ""
            raise UserError(
                f"prompts: {path} holds no question{first}; give rows with messages, "
                "turns or prompt"
            )

    def _add(self, number: int, at: int, line: bytes) -> None:
        if not line.strip():
            return
        try:
            turns_of(line)
        except ValueError as error:
            self.bad.append((number, str(error)))
        else:
            self.starts.append(at)
            self.lines.append(number)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, n: int) -> list[dict[str, str]]:
        """System and user turns of question n. Raises UserError when the file was changed
        meanwhile.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.starts[n])
                return turns_of(file.readline())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path}:{self.lines[n]}: changed while it was read ({error}); start again"
            ) from None


def turns_of(line: bytes) -> list[dict[str, str]]:
    """The system turn, if any, and the user turns of a row. Raises ValueError in a user's
    words.
    """
    row = parse_line(line)
    if not isinstance(row, dict):
        raise ValueError("is not an object {..}")
    turns = row.get("messages") or row.get("conversations")
    if turns is not None:
        if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
            raise ValueError("its turns are not a list of objects")
        found = [(t.get("role", t.get("from")), t.get("content", t.get("value"))) for t in turns]
        if any(role in ("tool", "function") for role, _ in found):
            raise ValueError("holds tool turns, whose results cannot be asked for again")
        kept = [("user" if role == "human" else role, text) for role, text in found]
        kept = [pair for pair in kept if pair[0] in ("system", "user")]
    elif "turns" in row or "prompt" in row:
        given = row["turns"] if "turns" in row else [row["prompt"]]
        if not isinstance(given, list):
            raise ValueError("its turns are not a list")
        kept = [("user", text) for text in given]
    else:
        raise ValueError("has none of messages, conversations, turns, prompt")
    for i, (_, text) in enumerate(kept):
        _check(i, text)
    if not any(role == "user" for role, _ in kept):
        raise ValueError("has no user turn")
    if any(role == "system" for role, _ in kept[1:]):
        raise ValueError("a system turn may only stand first")
    return [{"role": str(role), "content": text} for role, text in kept]


def _check(i: int, text: object) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"turn {i}: content is empty or no text")
    if not is_whole(text):
        raise ValueError(f"turn {i}: holds half of a surrogate pair")
