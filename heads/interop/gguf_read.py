"""A GGUF file read without the package that wrote it: header, keys, tensors.

The layout is that of the public GGUF specification, version 3, little-endian: magic, version,
two counts, key-value pairs, tensor infos, padding to the alignment, data. Sizes are checked
against the file before anything is taken from it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError

MAGIC, VERSION = b"GGUF", 3
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
# type number -> (name, values in a block, bytes of a block)
TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    3: ("q4_1", 32, 20),
    8: ("q8_0", 32, 34),
    27: ("i64", 1, 8),
}
MOST_KEYS, MOST_TENSORS, MOST_DIMS = 1 << 16, 1 << 20, 4


@dataclass
class GgufFile:
    """fields: keys and their values. tensors: float32 or int64, shapes as torch has them
    (slowest dimension first). types: each tensor's type in the file, such as q8_0."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


class _Bytes:
    """A cursor over the file's bytes that never leaves them."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise UserError(f"{self.path}: cut off at byte {len(self.data)}; write it again")
        part = self.data[self.at : self.at + count]
        self.at += count
        return part

    def scalar(self, kind: int) -> Any:
        shape = SCALARS.get(kind)
        if shape is None:
            raise UserError(f"{self.path}: value type {kind} is none of GGUF's; not a sound file")
        return struct.unpack(shape, self.take(struct.calcsize(shape)))[0]

    def count(self, most: int, what: str) -> int:
        found = int(self.scalar(10))
        if found > most:
            raise UserError(f"{self.path}: {found} {what}; at most {most} are read")
        return found

    def text(self) -> str:
        size = self.count(len(self.data), "bytes in a name")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: a name is no UTF-8; not a sound file") from None

    def value(self) -> Any:
        kind = self.scalar(4)
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(kind)
        inner = self.scalar(4)
        size = self.count(len(self.data), "entries in a list")
        if inner == STRING:
            return [self.text() for _ in range(size)]
        return [self.scalar(inner) for _ in range(size)]


def read_gguf(path: Path, with_tensors: bool = True) -> GgufFile:
    """Keys, and tensors unless told otherwise.

    Raises UserError in one line for a file that is missing, cut off, of another version, with
    overlapping or unknown tensors.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    cursor = _Bytes(data, path)
    if cursor.take(4) != MAGIC:
        raise UserError(f"{path}: no GGUF file; give one that llama.cpp loads")
    version = cursor.scalar(4)
    if version != VERSION:
        raise UserError(f"{path}: GGUF version {version}; version {VERSION} is read")
    count = cursor.count(MOST_TENSORS, "tensors")
    keys = cursor.count(MOST_KEYS, "keys")
    out = GgufFile(path)
    for _ in range(keys):
        name = cursor.text()
        if name in out.fields:
            raise UserError(f"{path}: key {name} stands there twice; not a sound file")
        out.fields[name] = cursor.value()
    if with_tensors:
        _tensors(cursor, count, out)
    return out


def _tensors(cursor: _Bytes, count: int, out: GgufFile) -> None:
    """Read the infos, then the data behind the padding."""
    infos = []
    for _ in range(count):
        name = cursor.text()
        dims = int(cursor.scalar(4))
        if not 1 <= dims <= MOST_DIMS:
            raise UserError(f"{out.path}: {name} has {dims} dimensions; 1 to {MOST_DIMS} are read")
        shape = [int(cursor.scalar(10)) for _ in range(dims)]
        kind = int(cursor.scalar(4))
        start = int(cursor.scalar(10))
        infos.append((name, shape, kind, start))
    step = out.fields.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        raise UserError(f"{out.path}: general.alignment is {step!r}; expected a whole number")
    base = math.ceil(cursor.at / step) * step
    end = 0
    for name, shape, kind, start in sorted(infos, key=lambda info: info[3]):
        if kind not in TYPES:
            raise UserError(
                f"{out.path}: {name} has tensor type {kind}; "
                f"{', '.join(label for label, *_ in TYPES.values())} are read"
            )
        label, block, size = TYPES[kind]
        if name in out.tensors or start < end or start % step:
            raise UserError(f"{out.path}: {name} stands twice or over another; not a sound file")
        if shape[0] % block:
            raise UserError(f"{out.path}: rows of {name} are no multiple of {block}")
        length = math.prod(shape) // block * size
        cursor.at = base + start
        out.tensors[name] = _decoded(cursor.take(length), label, shape[::-1])
        out.types[name] = label
        end = start + length


def _decoded(data: bytes, label: str, shape: list[int]) -> Tensor:
    """float32 (int64 for i64) values of a tensor's bytes."""
    if label == "i64":
        return torch.from_numpy(np.frombuffer(data, "<i8").copy()).reshape(shape)
    if label in ("f32", "f16"):
        flat = np.frombuffer(data, "<f4" if label == "f32" else "<f2").astype(np.float32)
        return torch.from_numpy(flat).reshape(shape)
    rows = np.frombuffer(data, np.uint8).reshape(-1, 34 if label == "q8_0" else 20)
    scale = rows[:, :2].copy().view("<f2").astype(np.float32)
    if label == "q8_0":
        values = rows[:, 2:].copy().view(np.int8).astype(np.float32) * scale
    else:  # q4_1: scale, minimum, 32 nibbles: low halves first
        lowest = rows[:, 2:4].copy().view("<f2").astype(np.float32)
        nibbles = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], 1)
        values = nibbles.astype(np.float32) * scale + lowest
    return torch.from_numpy(values).reshape(shape)
