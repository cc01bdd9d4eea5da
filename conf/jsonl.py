"""JSONL files: those that a stranger may have written, line by line, and our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError

MAX_LINE = 8 << 20  # bytes; a longer line is no conversation
GIVE = "give an existing JSONL file"
PACKED = {  # how a file begins that holds no lines
    b"\x1f\x8b": "compressed (gzip)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ\x00": "compressed (xz)",
    b"PAR1": "a parquet file",
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
    """Return one JSON value. Raises ValueError in words for a user."""
    if len(line) > MAX_LINE:
        raise ValueError(f"line of {len(line)} bytes (limit {MAX_LINE})")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if "\0" in text:
        raise ValueError("holds a NUL byte")
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def is_array(lines: Iterable[bytes]) -> bool:
    """Return whether a file's lines open an array that the first line does not close, or are an
    array of objects and nothing else: JSON as ShareGPT is handed around. Looks at two lines."""
    filled = (line for line in lines if line.strip())
    first = next(filled, b"").removeprefix(b"\xef\xbb\xbf").strip()
    if not first.startswith(b"["):
        return False
    return not first.endswith(b"]") or (b"{" in first and next(filled, None) is None)


def read_places(path: Path, key: str, fix: str = GIVE) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset in bytes, line) of the lines that are not blank, for `parse_line`.

    key: what names the file in messages; fix: what to do without it. Raises UserError for a
    file that cannot be read, for a compressed one or parquet, and for one that holds a single
    JSON array, as ShareGPT is handed around."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"{key}: cannot read {path} ({error.strerror}); {fix}") from None
    with stream:
        _check_plain(path, key, stream.read(8))
        stream.seek(0)
        if is_array(iter(lambda: stream.readline(MAX_LINE), b"")):
            raise UserError(
                f"{key}: {path} is one JSON array, not an object a line; convert it: "
                f"jq -c '.[]' {path} > {path.stem}.jsonl"
            )
        stream.seek(0)
        at = 0
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, at, line
            at += len(line)


def _check_plain(path: Path, key: str, begin: bytes) -> None:
    """Raise UserError for a file that begins as packed ones do."""
    kind = next((kind for start, kind in PACKED.items() if begin.startswith(start)), "")
    if kind:
        way = "unpack it, or write it as JSONL (datasets.Dataset.to_json)"
        if key == "data.path":
            way = f"have its folder read: data=hub data.path={path.parent}"
        raise UserError(f"{key}: {path} is {kind}, not lines of JSON; {way}")


def read_lines(path: Path, key: str = "data.path", fix: str = GIVE) -> Iterator[tuple[int, bytes]]:
    """As `read_places`, without the offsets."""
    return ((number, line) for number, _, line in read_places(path, key, fix))


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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("has a key twice")
    return made
