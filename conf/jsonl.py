"""One line of a JSONL file that a stranger may have written."""

from __future__ import annotations

import json
from typing import Any

MAX_LINE = 8 << 20  # bytes; a longer line is no conversation


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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("has a key twice")
    return made
