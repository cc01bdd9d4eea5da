"""What a cycle of an engine costs, by requests at a time and draft tokens: measured points in a
JSON file, and the curve through them.

    {"points": [{"batch": 1, "draft_tokens": 0, "ms": [31.0, 30.2]},
                {"batch": 1, "draft_tokens": 3, "ms": [44.1, 43.0]}]}

`ms` is one cycle of the whole batch: draft, verify, sample; draft_tokens 0 is plain decoding.
`kept` may stand beside it: the share of the draft tokens due on these prompts, one at a time, that
the engine accepted under this load. A sound engine keeps them all; one that mixes up its requests
does not. `tune.py engine` writes such a file from a small load; one by hand does as well.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.jsonl import parse_line
from scripts.common import files
from scripts.tuning.cost import Curve

FORMAT = 1
LEAST_MS, MOST_MS = 1e-9, 1e12  # of a cycle, in a file
MOST = 1024  # requests at a time or draft tokens that a file may name


@dataclass(frozen=True)
class Point:
    """Measured milliseconds of one cycle of `batch` requests that draft `draft_tokens` each.
    kept: the share of the accepted draft tokens that one request at a time has; None where
    nobody counted."""

    batch: int
    draft_tokens: int
    ms: tuple[float, ...]
    kept: float | None = None


@dataclass(frozen=True)
class Costs:
    """An engine's curve. engine: what it is, as it says itself."""

    engine: str
    points: tuple[Point, ...]

    def curve(self) -> Curve:
        """Milliseconds over draft tokens, for every batch that was measured plain and with
        drafts. Raises UserError when there is none."""
        known: dict[int, set[int]] = {}
        for point in self.points:
            known.setdefault(point.batch, set()).add(point.draft_tokens)
        whole = {batch for batch, drafts in known.items() if 0 in drafts and len(drafts) > 1}
        if not whole:
            raise UserError(
                "costs: no batch was measured both plain (draft_tokens 0) and with drafts; "
                "measure both with scripts/tune.py engine url=... plain=..."
            )
        return Curve.fit(
            (p.batch, p.draft_tokens, ms) for p in self.points if p.batch in whole for ms in p.ms
        )

    @property
    def deepest(self) -> int:
        """Most draft tokens that were measured."""
        return max(p.draft_tokens for p in self.points)

    def kept(self, batch: int) -> float:
        """The share of its acceptance that a draft keeps with `batch` requests at a time, from 0
        to 1: the mean over depths where it was counted, in between a straight line. Alone it
        keeps all, where nobody counted."""
        counted: dict[int, list[float]] = {}
        for point in self.points:
            if point.kept is not None and point.draft_tokens:
                counted.setdefault(point.batch, []).append(min(point.kept, 1.0))
        if not counted:
            return 1.0
        counted.setdefault(1, [1.0])
        sizes = sorted(counted)
        shares = [statistics.fmean(counted[size]) for size in sizes]
        return float(np.interp(batch, sizes, shares))

    def joined(self, points: Iterable[Point]) -> Costs:
        """With further points; those measured anew take the place of the old ones."""
        kept = {(p.batch, p.draft_tokens): p for p in self.points}
        kept |= {(p.batch, p.draft_tokens): p for p in points}
        return Costs(self.engine, tuple(kept[key] for key in sorted(kept)))

    def to_json(self) -> dict[str, Any]:
        """What stands in the file."""
        rows = [
            {
                "batch": p.batch,
                "draft_tokens": p.draft_tokens,
                "ms": [round(ms, 4) for ms in p.ms],
                **({} if p.kept is None else {"kept": round(p.kept, 4)}),
            }
            for p in self.points
        ]
        return {"format": FORMAT, "engine": self.engine, "points": rows}


def load(path: Path) -> Costs:
    """A file of points. Raises UserError that names file and row."""
    try:
        value = parse_line(path.read_bytes())
    except OSError as error:
        raise UserError(f"costs: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"costs: {path} {error}; give a file of scripts/tune.py engine") from None
    rows = value.get("points") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows or value.get("format", FORMAT) != FORMAT:
        raise UserError(f"costs: {path} holds no points; give a file of scripts/tune.py engine")
    points = [_point(path, number, row) for number, row in enumerate(rows, 1)]
    engine = value.get("engine", "")
    return Costs(engine if isinstance(engine, str) else "", ()).joined(points)


def save(path: Path, costs: Costs) -> None:
    """Write the file."""
    files.write_json(path, costs.to_json())


def _point(path: Path, number: int, row: Any) -> Point:
    """One row, checked. Raises UserError."""
    fields = row if isinstance(row, dict) else {}
    batch, drafts, ms, kept = (fields.get(k) for k in ("batch", "draft_tokens", "ms", "kept"))
    times: Sequence[Any] = ms if isinstance(ms, list) else [ms]
    if (
        not _whole(batch, 1)
        or not _whole(drafts, 0)
        or not times
        or not all(_time(value) for value in times)
        or not (kept is None or _size(kept))
    ):
        raise UserError(
            f"costs: {path}: point {number} is {str(row)[:80]}; it needs batch from 1, "
            "draft_tokens from 0, ms from 1e-9 to 1e12, and kept from 0 on, if any"
        )
    share = None if kept is None else float(kept)
    return Point(int(batch), int(drafts), tuple(float(value) for value in times), share)  # type: ignore[arg-type]


def _whole(value: Any, low: int) -> bool:
    return type(value) is int and low <= value <= MOST


def _time(value: Any) -> bool:
    return _size(value) and LEAST_MS <= value <= MOST_MS


def _size(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= sys.float_info.max
