"""Rows become tokens: by a pool of processes, in parts that are kept.

The source is read once, in order, in chunks. A chunk whose part lies in the cache
folder from an attempt that was killed is not computed again. After SECONDS of work by this
process others are started, as many as data.workers says; the parts are put together in the
order of the source, so the number of processes changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.train.data.rows import BadRow, ChatRow, RowReading, encode, raw_row
from outrider.train.data.tokens import TokenWriter, mapped
from outrider.train.data.workers import SECONDS, call, end
from outrider.train.data.workers import pool as fresh

CHUNK, LETTERS = 2048, 1 << 19  # rows and letters of a part, about
# What the header tells of turns that are not trained on as they stand in the data.
DROPPED = "before the first question dropped"
HIDDEN = "without their reasoning, which the chat template cuts off (data.turns=rows trains on it)"
Item = ChatRow | BadRow | tuple[int, bytes]  # a row, or line number and line of a JSONL file


@dataclass(frozen=True)
class Work:
    """What turns rows into tokens. name: of the source, for messages."""

    name: str
    tokenizer: Any
    how: RowReading
    held_out: float


@dataclass
class TokenPart:
    """The tokens of some rows. bad: messages about rows that were left out, without the name of
    the source. turns: see train.data.rows.Encoded. notes: how many turns lack what.
    """

    writer: TokenWriter
    bad: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=lambda: [0, 0, 0])
    rows: int = 0
    notes: Counter[str] = field(default_factory=Counter)


def encode_chunk(items: Iterable[Item], work: Work) -> TokenPart:
    """The tokens of a chunk. Raises UserError without a chat template."""
    part = TokenPart(TokenWriter(None))
    for item in items:
        part.rows += 1
        row = raw_row(work.name, *item) if isinstance(item, tuple) else item
        try:
            if isinstance(row, BadRow):
                raise row
            found = encode(row, work.tokenizer, work.how)
        except BadRow as problem:
            part.bad.append(str(problem).removeprefix(work.name))
            continue
        line, held = int(row.where.rpartition(":")[2]), share(row) < work.held_out
        part.notes[DROPPED] += row.dropped
        for ids, loss, turns, hidden in found:
            part.writer.add(ids, loss, line, held)
            part.turns = [a + b for a, b in zip(part.turns, turns, strict=True)]
            part.notes[HIDDEN] += hidden
    return part


def share(row: ChatRow) -> float:
    """A number in [0, 1) from what the row asks: the same question falls on the same side,
    whatever the file.
    """
    requested = (
        row.text
        if row.chat is None
        else "\n".join(m["content"] for m in row.chat if m["role"] == "user")
    )
    return int.from_bytes(hashlib.sha256(requested.encode()).digest()[:8]) / 2**64


class Parts:
    """Finished parts in a folder. None as folder: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"part-{number:07d}.safetensors"

    def read(self, number: int, rows: int) -> TokenPart | None:
        """A part of so many rows that an earlier attempt has left, if it is sound."""
        found = mapped(self.path(number)) if self.folder is not None else None
        if found is None:
            return None
        tensors, about = found
        try:
            if about["rows"] != rows:
                return None
            writer = TokenWriter(None)
            writer.extend(tensors)
            bad, notes = [str(b) for b in about["bad"]], Counter(about.get("notes", {}))
            return TokenPart(writer, bad, list(about["turns"]), rows, notes)
        except (KeyError, TypeError):
            return None

    def write(self, number: int, part: TokenPart) -> None:
        """Keep a part; a disk that refuses costs no more than this."""
        if self.folder is not None:
            about: dict[str, Any] = {"bad": part.bad, "turns": part.turns, "rows": part.rows}
            about["notes"] = dict(part.notes)
            with contextlib.suppress(OSError):
                part.writer.write(self.path(number), about)

    def remove(self) -> None:
        """The rows are together: the parts are not needed any more."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def encoded(
    source: Iterable[Item], work: Work, workers: int, parts: Parts, check_stop: Callable[[], None]
) -> Iterator[TokenPart]:
    """The parts of a source in its order. check_stop: called often; what it raises ends the
    work, and the parts so far stay. Raises UserError as encode_chunk does."""
    begun, pool = time.monotonic(), None
    waiting: deque[tuple[int, TokenPart | Future[TokenPart]]] = deque()

    def settled() -> TokenPart:
        number, found = waiting.popleft()
        if isinstance(found, TokenPart):
            return found
        while wait([found], timeout=0.5).not_done:
            check_stop()
        part = found.result()
        parts.write(number, part)
        return part

    try:
        for number, (items, only) in enumerate(_chunks(source)):
            check_stop()
            part = parts.read(number, len(items))
            if part is not None:
                waiting.append((number, part))
            elif pool is None and (workers < 2 or time.monotonic() < begun + SECONDS):
                part = encode_chunk(items, work)
                if not only:
                    parts.write(number, part)
                waiting.append((number, part))
            else:
                pool = pool or fresh(workers, work)
                waiting.append((number, pool.submit(call, _in_worker, items)))
            while len(waiting) > (workers + 2 if pool else 0):
                yield settled()
        while waiting:
            yield settled()
    finally:
        if pool is not None:
            end(pool)


def _chunks(source: Iterable[Item]) -> Iterator[tuple[list[Item], bool]]:
    """(rows of a chunk, whether it is the only one): up to CHUNK rows or about LETTERS letters."""
    chunk: list[Item] = []
    letters, first = 0, True
    for item in source:
        if chunk and (len(chunk) == CHUNK or letters > LETTERS):
            yield chunk, False
            chunk, letters, first = [], 0, False
        chunk.append(item)
        letters += _letters(item)
    if chunk:
        yield chunk, first


def _letters(item: Item) -> int:
    """About how long a row is."""
    if isinstance(item, tuple):
        return len(item[1])
    if isinstance(item, BadRow) or item.chat is None:
        return len(item.reason if isinstance(item, BadRow) else item.text)
    return sum(len(m["content"] or "") for m in item.chat)


def _in_worker(work: Work, items: list[Item]) -> TokenPart:
    return encode_chunk(items, work)
