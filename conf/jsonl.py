"""JSONL files: those that a stranger may have written, line by line, and our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from outrider.conf.errors import UserError

MAX_LINE = 8 << 20  # bytes; a longer line is no conversation
OTHERS = {  # how a file begins that holds no lines of JSON -> what it is, what makes lines of it
    b"\x1f\x8b": ("compressed (gzip)", "gzip -dk {}"),
    b"\x28\xb5\x2f\xfd": ("compressed (zstd)", "zstd -dk {}"),
    b"PAR1": ("a parquet file", "datasets' Dataset.from_parquet('{}').to_json"),
    b"[": ("one JSON array", "jq -c '.[]' {}"),
}
HALF = "half of a surrogate pair (half an emoji, as in a text that was cut)"


def inner(text: str) -> Any:
    """Return what the JSON inside a value says. Raises ValueError for what is none, and for
    one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def is_whole(text: str) -> bool:
    """Return whether a text can be written as UTF-8: JSON may name halves of surrogate
    pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_line(line: bytes) -> Any:
    """Return one JSON value. Raises ValueError with a message for a user."""
    if len(line) > MAX_LINE:
        raise ValueError(f"line of {len(line)} bytes (limit {MAX_LINE})")
    try:
        text = line.decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("holds a NUL byte")
        return json.loads(text, object_pairs_hook=_no_duplicates)
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


def form(stream: BinaryIO) -> tuple[str, str]:
    """Return (what an open file holds in place of lines of JSON, what makes lines of it); empty
    texts for lines."""
    begin = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((said for how, said in OTHERS.items() if begin.startswith(how)), ("", ""))


def read_lines(
    path: Path, key: str = "data.path", fix: str = "give an existing JSONL file"
) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the lines that are not blank, for `parse_line`.

    key: what names the file in messages; fix: what to do without it. Raises UserError for a
    file that cannot be read, and for one that is compressed, parquet, or a single JSON array, as
    ShareGPT is handed around."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"{key}: cannot read {path} ({error.strerror}); {fix}") from None
    with stream:
        other, way = form(stream)
        if other:
            way = f"convert it: {way.format(path)}"
            if key == "data.path":  # train/data/load.py unpacks the others itself
                way = f"have its folder read: data=hub data.path={path.parent}"
            raise UserError(f"{key}: {path} is {other}, not an object a line; {way}")
        stream.seek(0)
        yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())


def records(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a log of our own, such as metrics.jsonl. A line that a kill cut
    short is left out. Raises OSError."""
    found = []
    for line in path.read_text(errors="replace").split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found
