"""Token rows that need not fit into memory: collected in bounded memory, kept in one
safetensors file, read from it by mapping.

Why a file of our own and no shuffle buffer: a batch must be a function of (seed, epoch, k)
alone, so any row may be due at any step. Five bytes a token on disk give that to data of any
size, and the pages in use are the system's cache: it takes them back when memory is short. The
mapping is read-only, so that it is not counted against memory either.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import warnings
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from outrider.conf import disk

SPILL = 1 << 21  # tokens held in memory before they go to disk
# In the file the widest types come first, so that each tensor starts at a multiple of its own
# size.
KINDS = {
    "offsets": ("I64", np.int64),
    "lines": ("I64", np.int64),
    "tally": ("I64", np.int64),
    "ids": ("I32", np.int32),
    "loss": ("BOOL", np.bool_),
    "held": ("BOOL", np.bool_),
}
HASHED = ("ids", "loss", "offsets", "held")  # in this order: what makes two data sets the same
PART = 1 << 20  # bytes handled at a time
COUNTED = 1 << 17  # tokens counted at a time


class TokenWriter:
    """Rows as they are made. folder: where tokens may spill to; None keeps all of them in
    memory.

    Besides the unspilled tokens it holds 17 bytes a row. Use as a context manager, which
    removes what was spilled. Raises OSError when the disk refuses."""

    def __init__(self, folder: Path | None) -> None:
        self.ids, self.loss = array("i"), bytearray()
        self.offsets, self.lines, self.held = array("q", [0]), array("q"), bytearray()
        self.tally = np.zeros(0, np.int64)  # supervised tokens of the rows not held out, by id
        self.folder = folder
        self._tallied = 0  # rows of which that is known
        self.supervised, self.max_id = 0, -1  # tokens of all rows, and the largest id
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, ids: list[int], loss: list[bool], line: int, held: bool) -> None:
        """One row. loss: which of its tokens are supervised."""
        self.ids.extend(ids)
        self.loss += bytes(loss)
        self.offsets.append(self.offsets[-1] + len(ids))
        self.lines.append(line)
        self.held.append(held)
        if self.folder is not None and len(self.ids) >= SPILL:
            self._spill()

    def extend(self, tensors: Mapping[str, Tensor]) -> None:
        """Rows by the names of KINDS, as `tensors` or `mapped` gives them."""
        found = {name: tensors[name].numpy() for name in KINDS}
        offset = self.offsets[-1]
        self.ids.frombytes(found["ids"].tobytes())
        self.loss += found["loss"].tobytes()
        self.held += found["held"].tobytes()
        self.offsets.frombytes((found["offsets"][1:] + offset).tobytes())
        self.lines.frombytes(found["lines"].tobytes())
        self._count()
        if self.folder is not None and len(self.ids) >= SPILL:
            self._spill()

    def _count(self) -> None:
        """Tally the rows whose tokens are in memory and not yet tallied."""
        first, self._tallied = self._tallied, len(self.held)
        if first == self._tallied or not len(self.ids):
            return
        lengths = np.diff(np.frombuffer(self.offsets, np.int64)[first:])
        held = np.frombuffer(self.held, np.bool_)[first:]
        size = int(lengths.sum())
        ids = np.frombuffer(self.ids, np.int32)[-size:]
        loss = np.frombuffer(self.loss, np.bool_)[-size:]
        self.supervised += int(loss.sum())
        on = loss & ~held.repeat(lengths)
        for start in range(0, size, COUNTED):  # a count takes 8 bytes a token
            some = slice(start, start + COUNTED)
            self.max_id = max(self.max_id, int(ids[some].max()))
            more = np.bincount(ids[some][on[some]], minlength=len(self.tally))
            more[: len(self.tally)] += self.tally
            self.tally = more.astype(np.int64, copy=False)

    def _spill(self) -> None:
        assert self.folder is not None
        self._count()
        for name, part in (("ids", self.ids), ("loss", self.loss)):
            if name not in self._files:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._files[name] = tempfile.TemporaryFile(dir=self.folder, prefix=".tmp-")  # noqa: SIM115
            self._files[name].write(part)
        self.ids, self.loss = array("i"), bytearray()

    @property
    def spilled(self) -> bool:
        """Whether the rows are more than memory holds: `tensors` cannot give them, `write`
        can.
        """
        return bool(self._files)

    def tensors(self) -> dict[str, Tensor]:
        """The rows by the names of KINDS, in memory."""
        self._count()
        return {k: torch.from_numpy(np.array(self._array(k), copy=True)) for k in KINDS}

    def _array(self, name: str) -> Any:
        """What of a tensor is in memory."""
        held, kind = getattr(self, name), KINDS[name][1]
        return np.frombuffer(held, dtype=kind) if len(held) else np.empty(0, kind)

    def write(self, path: Path, about: dict[str, Any]) -> None:
        """Leave the rows as `path`: staged, synced, renamed. about: JSON kept with them.

        Raises OSError; then there is no such file."""
        self._count()
        if self.spilled:
            self._spill()
        sizes = {
            "tally": 8 * len(self.tally),
            "ids": 4 * self.offsets[-1],
            "loss": self.offsets[-1],
            "offsets": 8 * len(self.offsets),
            "lines": 8 * len(self.lines),
            "held": len(self.held),
        }
        entries, at = {}, 0
        for name, (kind, dtype) in KINDS.items():
            shape = [sizes[name] // np.dtype(dtype).itemsize]
            entries[name] = {
                "dtype": kind,
                "shape": shape,
                "data_offsets": [at, at := at + sizes[name]],
            }
        whole, tokens = self._hashes()
        tally = hashlib.sha256(self.tally.data).hexdigest()
        own = {"sha256": whole, "tokens_sha256": tokens, "tally_sha256": tally, **self._sums()}
        said = {**own, **about}
        meta = {"rows": json.dumps({**said, "about_sha256": _sealed(said)})}
        head = json.dumps({"__metadata__": meta, **entries}).encode()
        head += b" " * (-len(head) % 8)
        with disk.whole(path) as stage, stage.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in KINDS:
                if spilled := self._files.get(name):
                    spilled.seek(0)
                    shutil.copyfileobj(spilled, file, PART)
                else:
                    file.write(self._array(name))

    def _sums(self) -> dict[str, int]:
        """Further numbers about the rows, so that no start has to count again."""
        return {"supervised": self.supervised, "max_id": self.max_id}

    def sha256(self) -> str:
        """Content hash, as sha256_of gives it for the tensors."""
        return self._hashes()[0]

    def _hashes(self) -> tuple[str, str]:
        """Content hash of all that makes two data sets the same, and of ids and row bounds
        alone (see train.features.store)."""
        whole, tokens = hashlib.sha256(), hashlib.sha256()
        for name in HASHED:
            both = (whole, tokens) if name in ("ids", "offsets") else (whole,)
            if spilled := self._files.get(name):
                spilled.seek(0)
                while part := spilled.read(PART):
                    for total in both:
                        total.update(part)
            for total in both:
                total.update(self._array(name))
        return whole.hexdigest(), tokens.hexdigest()


def _sealed(about: Mapping[str, Any]) -> str:
    """The hash of what a file says about itself."""
    rest = {name: value for name, value in about.items() if name != "about_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sha256_of(tensors: dict[str, Tensor]) -> str:
    """Content hash of ids, loss mask, row bounds and the held-out choice, without a copy of
    them.
    """
    total = hashlib.sha256()
    for name in HASHED:
        total.update(tensors[name].contiguous().numpy().data)
    return total.hexdigest()


def mapped(path: Path, check: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors of a file of TokenWriter, mapped read-only, and what it says about itself;
    None when there is none or it is damaged. Nothing may be written into them. check: read all
    of it to see whether it is as it was written."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                return None
            head = json.loads(file.read(length))
        about = json.loads(head["__metadata__"]["rows"])
        tensors = {}
        for name, (kind, dtype) in KINDS.items():
            begin, end = head[name]["data_offsets"]
            count = (end - begin) // np.dtype(dtype).itemsize
            if head[name]["dtype"] != kind or not 0 <= begin <= end <= size - 8 - length:
                return None
            tensors[name] = _map(path, dtype, 8 + length + begin, count)
        tally = hashlib.sha256(tensors["tally"].numpy().data).hexdigest()
        sound = about["about_sha256"] == _sealed(about) and about["tally_sha256"] == tally
        if sound and check:
            sound = sha256_of(tensors) == about["sha256"]
        return (tensors, about) if sound else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _map(path: Path, dtype: Any, offset: int, count: int) -> Tensor:
    if not count:
        return torch.from_numpy(np.empty(0, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only: so it shall be
        return torch.from_numpy(np.memmap(path, dtype, "r", offset, (count,)))


class RowCounter:
    """How many rows were read so far, told on stderr now and then: tokenizing much text takes
    long.
    """

    def __init__(self, name: str, every: int = 20000) -> None:
        self.name, self.every, self.rows = name, every, 0

    def add(self, rows: int, tokens: int) -> None:
        """So many further rows were read; all rows hold so many tokens by now."""
        before, self.rows = self.rows, self.rows + rows
        if before // self.every < self.rows // self.every:
            print(
                f"{self.name}: {self.rows:,} rows read, {tokens:,} tokens",
                file=sys.stderr,
                flush=True,
            )
