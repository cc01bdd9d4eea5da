"""One table per layout says which tensor of theirs is which of ours. Export and import both
read it, so that they cannot drift apart.

    Row("blocks.{k}.layers.{l}.weight", "block_weight", "D D")

Placeholders that stand in `theirs` alone are leading dimensions of our tensor: block_weight
[K, L, D, D] here. Shapes are letters from a mapping of sizes, also products of them ("A 2*D").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter

import torch
from torch import Tensor

Sizes = Mapping[str, int]
COUNTS = {"k": "K", "l": "L", "f": "F"}  # placeholder -> the size that counts it
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {"float": FLOATS, "int64": (torch.int64,), "bool": (torch.bool,)}


@dataclass(frozen=True)
class TensorRow:
    """theirs: name in the file. ours: name in the head's state, "" for what follows from the
    target or from other tensors. when: a size that must not be 0 for the row to exist.
    optional: a file may lack it."""

    theirs: str
    ours: str
    shape: str
    when: str = ""
    dtype: str = "float"
    optional: bool = False


@dataclass(frozen=True)
class Spot:
    """One tensor of a file: its name, where it lies in ours, its shape."""

    name: str
    ours: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    row: TensorRow


def size_of(text: str, sizes: Sizes) -> tuple[int, ...]:
    """ "A 2*D" -> (A, 2 D)."""
    return tuple(
        math.prod(int(p) if p.isdigit() else sizes[p] for p in dim.split("*"))
        for dim in text.split()
    )


def spots(rows: Iterable[TensorRow], sizes: Sizes) -> Iterator[Spot]:
    """Every tensor that the table describes for these sizes."""
    for row in rows:
        if row.when and not sizes[row.when]:
            continue
        names = [name for _, name, _, _ in Formatter().parse(row.theirs) if name]
        mine = [name for _, name, _, _ in Formatter().parse(row.ours) if name]
        for values in itertools.product(*(range(sizes[COUNTS[n]]) for n in names)):
            given = dict(zip(names, values, strict=True))
            index = tuple(given[n] for n in names if n not in mine) if row.ours else ()
            yield Spot(
                row.theirs.format(**given),
                row.ours.format(**given),
                index,
                size_of(row.shape, sizes),
                row,
            )


def to_theirs(
    rows: Iterable[TensorRow], sizes: Sizes, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our state -> their tensors, but for the rows that name nothing of ours."""
    return {s.name: state[s.ours][s.index] for s in spots(rows, sizes) if s.ours}


def to_ours(
    rows: Iterable[TensorRow], sizes: Sizes, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Their tensors -> our state; what the file may lack and lacks is left out."""
    parts: dict[str, list[Spot]] = {}
    for spot in spots(rows, sizes):
        if spot.ours and spot.name in tensors:
            parts.setdefault(spot.ours, []).append(spot)
    state = {}
    for name, found in parts.items():
        lead = tuple(1 + max(column) for column in zip(*(s.index for s in found), strict=True))
        stacked = torch.stack([tensors[s.name] for s in found])
        state[name] = stacked.reshape(*lead, *found[0].shape)
    return state


def problems(
    rows: Iterable[TensorRow],
    sizes: Sizes,
    tensors: Mapping[str, Tensor],
    passed: Iterable[str] = (),
) -> list[str]:
    """What of a file does not fit the table, one line each. passed: further names that may
    stand there unread.
    """
    wanted = {s.name: s for s in spots(rows, sizes)}
    found = []
    for name, spot in wanted.items():
        if name not in tensors:
            found += [] if spot.row.optional else [f"{name}: missing; expected {list(spot.shape)}"]
            continue
        tensor = tensors[name]
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype not in DTYPES[spot.row.dtype]:
            found.append(f"{name}: its dtype is {dtype}, expected {spot.row.dtype}")
        if shape != spot.shape:
            hint = ", which is it transposed" if shape == spot.shape[::-1] else ""
            found.append(f"{name}: its shape is {list(shape)}{hint}; expected {list(spot.shape)}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            found.append(f"{name}: holds NaN or infinite values")
    for name in tensors:
        if name not in wanted and name not in passed:
            hint = (
                "a bias where this layout has none"
                if name.endswith("bias")
                else "no tensor of this layout"
            )
            found.append(f"{name}: unknown, {hint}")
    return found
