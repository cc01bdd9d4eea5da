"""One line of a JSONL file that a stranger may have written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_LINE = 8 << 20  # bytes; a longer line is no conversation
HALF = "half of a surrogate pair (half an emoji, as in a text that was cut)"


def is_whole(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON may name halves of surrogate pairs, which
    are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_line(line: bytes) -> Any:
    """One JSON value. Raises ValueError in words for a user."""
    if len(line) > MAX_LINE:
        raise ValueError(f"line of {len(line)} bytes (limit {MAX_LINE})")
    if b"\0" in line:
        raise ValueError("holds a NUL byte")
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def is_array(lines: Iterable[bytes]) -> bool:
    """Whether a file's lines open an array that the first line does not close, or are an array
    of objects and nothing
    else: JSON as ShareGPT is handed around, not JSONL. Looks at two lines at most."""
    filled = (line for line in lines if line.strip())
    first = next(filled, b"").removeprefix(b"\xef\xbb\xbf").strip()
    if not first.startswith(b"["):
        return False
    return not first.endswith(b"]") or (b"{" in first and next(filled, None) is None)


def no_array(path: Path) -> str:
    """What to tell about such a file."""
    return (
        f"{path} is one JSON array, not an object a line; convert it: jq -c '.[]' "
        f"{path} > {path.stem}.jsonl"
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("has a key twice")
    return made
