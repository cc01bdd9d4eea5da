"""Rows become tokens, by several processes, and stay in one safetensors file that is mapped.

A batch is a function of (seed, epoch, k) alone, so any row may be due at any step: the
tokens of all rows lie end to end in a file of the cache folder, five bytes a token, and the
pages in use are the system's cache. `datasets` keeps lists in pieces and a bit a truth
value, which no tensor can be a view of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf import disk
from outrider.train.data.config import RowsConfig
from outrider.train.data.rows import BadRow, ChatRow, Item, encode, read_row

CHUNK = 256  # rows that a process gets at a time
SECONDS = 5.0  # of work after which further processes are worth their start
COUNTED = 1 << 20  # tokens counted at a time
COLUMNS = ("ids", "loss", "offsets", "lines", "held")  # what there is of rows, see JoinedRows
# What is counted of the assistant's turns, and what the header says of those that are not
# trained on as they stand in the data.
TURNS = ("turns", "shown", "supervised")
DROPPED = "before the first question dropped"
HIDDEN = "without their reasoning, which the chat template cuts off (data.turns=rows trains on it)"
UNLEARNED = "not learned, as their weight says"
PASSED = "key "  # before the name of one that was not read


class Totals(NamedTuple):
    """What follows from all tokens. tally: [V] int64, supervised tokens of the rows not
    held out, by id. max_id: -1 without tokens. sha256: of all that makes two data sets the
    same; tokens_sha256: of the ids and where rows begin, on which features depend."""

    supervised: int
    max_id: int
    sha256: str
    tokens_sha256: str
    tally: Tensor


@dataclass
class TokenPart:
    """The tokens of `count` raw rows. rows: line that each comes from, whether it is kept out
    of training, ids and loss. bad: why rows were left out, ":line: reason". counted: assistant
    turns by what became of them."""

    count: int
    rows: list[tuple[int, bool, array[int], bytes]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Work:
    """Turns rows into tokens. name: of their source. held_out: the share of rows that is
    kept out of training."""

    name: str
    tokenizer: Any
    how: RowsConfig
    eos: frozenset[int]
    held_out: float

    def __call__(self, items: list[Item]) -> TokenPart:
        """The tokens of some rows. Raises UserError without a chat template."""
        part = TokenPart(len(items))
        for number, content in items:
            try:
                row = read_row(content, f"{self.name}:{number}")
                found = encode(row, self.tokenizer, self.how, self.eos)
            except BadRow as problem:
                part.bad.append(str(problem).removeprefix(self.name))
                continue
            held = share(row) < self.held_out
            part.counted[DROPPED] += row.dropped
            part.counted[UNLEARNED] += len(row.unlearned)
            part.counted.update(PASSED + key[:40] for key in row.passed)
            for ids, loss, turns, hidden in found:
                part.rows.append((number, held, array("i", ids), bytes(loss)))
                part.counted.update(dict(zip(TURNS, turns, strict=True)))
                part.counted[HIDDEN] += hidden
        return part


def share(row: ChatRow) -> float:
    """Return a number in [0, 1) from what the row asks: the same question falls on the same
    side, whatever the file."""
    requested = (
        row.text
        if row.chat is None
        else "\n".join(m["content"] for m in row.chat if m["role"] == "user")
    )
    return int.from_bytes(hashlib.sha256(requested.encode()).digest()[:8]) / 2**64


def encoded(source: Iterable[Item], work: Work, workers: int) -> Iterator[TokenPart]:
    """Yield the tokens of a source in its order: by this process alone for SECONDS, then by
    `workers` fresh ones (a fork of a process with threads and a GPU may hang), which
    changes nothing. Raises UserError as Work does.
    """
    begun, source = time.monotonic(), iter(source)
    waiting: deque[Future[TokenPart]] = deque()
    with contextlib.ExitStack() as stack:
        pool: ProcessPoolExecutor | None = None
        while items := list(islice(source, CHUNK)):
            if pool is None and (workers < 2 or time.monotonic() < begun + SECONDS):
                yield work(items)
                continue
            if pool is None:
                fresh = multiprocessing.get_context("spawn")
                pool = ProcessPoolExecutor(workers, fresh, _begin, (work,))
                stack.callback(pool.shutdown, cancel_futures=True)
            waiting.append(pool.submit(_in_worker, items))
            if len(waiting) > workers + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_work: Work  # of this worker


def _begin(work: Work) -> None:
    """In a worker: signals are the parent's to answer, and without a parent there is no
    work."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _in_worker(items: list[Item]) -> TokenPart:
    return _work(items)


def gathered(
    parts: Iterable[TokenPart], name: str, folder: Path | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(ids, loss, offsets, lines and held of all rows, {bad, counted}). folder: where the
    tokens go, so that they need not fit into memory; None: where the system has such files.
    name: of the source, for the words of progress."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    ids, loss = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
    offsets, lines, held = array("q", [0]), array("q"), bytearray()
    bad: list[str] = []
    counted: Counter[str] = Counter()
    rows = 0
    for part in parts:
        for line, out, row, on in part.rows:
            ids.write(row)
            loss.write(on)
            offsets.append(offsets[-1] + len(row))
            lines.append(line)
            held.append(out)
        bad += part.bad
        counted.update(part.counted)
        if rows // 20_000 < (rows := rows + part.count) // 20_000:
            told = f"{name}: {rows:,} rows read, {offsets[-1]:,} tokens"
            print(told, file=sys.stderr, flush=True)
    tensors = {
        "ids": _viewed(ids, np.int32),
        "loss": _viewed(loss, np.bool_),
        "offsets": torch.tensor(offsets),
        "lines": torch.tensor(lines, dtype=torch.int64),
        "held": torch.tensor(held, dtype=torch.uint8).bool(),
    }
    return tensors, {"bad": bad, "counted": dict(counted)}


def _viewed(file: Any, dtype: Any) -> Tensor:
    """Return the content of a file as a tensor that must not be written to."""
    file.flush()
    if not file.tell():
        return torch.from_numpy(np.empty(0, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only: so it shall be
        return torch.from_numpy(np.memmap(file, dtype, "r"))


def totals(tensors: Mapping[str, Tensor]) -> Totals:
    """Return what follows from the tokens of rows, read through once, a part at a time."""
    ids, loss, offsets, held = (tensors[name] for name in ("ids", "loss", "offsets", "held"))
    whole = hashlib.sha256(ids.numpy().data)
    tokens = whole.copy()
    tokens.update(offsets.numpy().data)
    for other in (loss, offsets, held):
        whole.update(other.numpy().data)
    size = 1 + int(ids.max()) if ids.numel() else 0
    supervised, tally, first = 0, torch.zeros(size, dtype=torch.int64), 0
    while first < held.numel():
        last = int(torch.searchsorted(offsets, offsets[first] + COUNTED)) - 1
        rows = slice(first, first := min(max(last, first + 1), held.numel()))
        part = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        on = loss[part]
        supervised += int(on.sum())
        lengths = offsets[rows.start : rows.stop + 1].diff()
        trained = ids[part][on & ~held[rows].repeat_interleave(lengths)]
        tally += torch.bincount(trained.long(), minlength=tally.numel())
    return Totals(supervised, tally.numel() - 1, whole.hexdigest(), tokens.hexdigest(), tally)


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Leave rows as a file, whole or not at all. Raises OSError when the disk refuses."""
    found = totals(tensors)._asdict()
    everything = {**tensors, "tally": found.pop("tally")}
    try:
        with disk.whole(path) as stage:
            save_file(everything, stage, {"rows": json.dumps({**about, "totals": found})})
    except SafetensorError as error:  # how the library reports a disk that refuses
        raise OSError(None, str(error), str(path)) from None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Totals] | None:
    """Return the rows of a file of `save`, mapped; None where there is none, or no whole one."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["rows"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = Totals(**about.pop("totals"), tally=tensors.pop("tally"))
        return tensors, about, known
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
