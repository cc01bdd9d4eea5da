"""What a step of an engine costs, by concurrent requests and draft tokens: measured rows in a
JSON file, and the curve through them. The engine's own bench measures them (docs/serving.md).

    {"engine": "vLLM 0.33.0 on an H100", "points": [
      {"concurrent_requests": 1, "draft_tokens": 0, "tokens_per_second": 92.0},
      {"concurrent_requests": 1, "draft_tokens": 3, "tokens_per_second": 148.0,
       "accepted_length": 2.1},
      {"concurrent_requests": 8, "draft_tokens": 3, "step_seconds": 0.0441}]}

A row has step_seconds, one step of all requests together (draft, verify, sample), or
tokens_per_second, of all requests together, from which it follows: a step brings
accepted_length tokens to every request, the bonus token counted, and one where draft_tokens is 0.
The same point may stand there several times: each row is a measurement. Where rows say their
accepted length, what is lost of it under load counts (`Costs.kept`).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Interval

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line
from outrider.conf.typed import from_json
from outrider.scripts.tuning.cost import Curve

LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e9  # of a step
MOST = 1024  # concurrent requests or draft tokens that a file may name
Positive = Annotated[float, Interval(gt=0, le=1e15)]


@dataclass(frozen=True)
class Point:
    """One measurement, as a row of the file."""

    concurrent_requests: Annotated[int, Interval(ge=1, le=MOST)]
    draft_tokens: Annotated[int, Interval(ge=0, le=MOST)]
    step_seconds: Positive | None = None
    tokens_per_second: Positive | None = None
    accepted_length: Annotated[float, Ge(1)] | None = None

    def problem(self) -> str:
        """What is wrong with the row as a whole; "" where nothing is."""
        if (self.step_seconds is None) == (self.tokens_per_second is None):
            return "give either step_seconds or tokens_per_second"
        most = self.draft_tokens + 1
        if self.accepted_length is not None and not self.accepted_length <= most:
            return f"accepted_length: {self.accepted_length:g}, but a step brings {most} at most"
        if self.step_seconds is None and self.draft_tokens and self.accepted_length is None:
            return "tokens_per_second with draft tokens needs accepted_length beside it"
        if not LEAST_SECONDS <= self.seconds <= MOST_SECONDS:
            return f"a step of {self.seconds:.3g} s is none"
        return ""

    @property
    def seconds(self) -> float:
        """Of a step of all requests together."""
        if self.step_seconds is not None:
            return self.step_seconds
        assert self.tokens_per_second is not None
        tokens = self.concurrent_requests * (self.accepted_length or 1.0)
        return tokens / self.tokens_per_second


@dataclass(frozen=True)
class Costs:
    """An engine's measurements. engine: what it is, in the words of who measured."""

    engine: str
    points: tuple[Point, ...]

    def curve(self) -> Curve:
        """Milliseconds of a step over draft tokens, for every number of concurrent requests that
        was measured plain and with drafts. A measured point is read as it stands, also where a
        longer draft was cheaper: kernels take tokens in tiles. Raises UserError when there is
        none."""
        known: dict[int, set[int]] = {}
        for point in self.points:
            known.setdefault(point.concurrent_requests, set()).add(point.draft_tokens)
        whole = {batch for batch, drafts in known.items() if 0 in drafts and len(drafts) > 1}
        if not whole:
            raise UserError(
                "costs: no number of concurrent requests was measured both plain (draft_tokens 0) "
                "and with drafts; add the rows that are missing"
            )
        rows = (p for p in self.points if p.concurrent_requests in whole)
        steps = ((p.concurrent_requests, p.draft_tokens, 1000 * p.seconds) for p in rows)
        return Curve.fit(steps, rising=False)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The numbers of draft tokens that were measured, ascending, 0 among them or not."""
        return tuple(sorted({p.draft_tokens for p in self.points}))

    @property
    def deepest(self) -> int:
        """Most draft tokens that were measured."""
        return self.drafts[-1]

    def kept(self, batch: int) -> float:
        """The share of accepted draft tokens that `batch` concurrent requests keep of what the
        fewest do, from 0 to 1: by rows of the same draft tokens that say their accepted length,
        the mean over those; a straight line in between; 1 where nothing was counted. A sound
        engine keeps all."""
        lengths: dict[int, dict[int, list[float]]] = {}
        for p in self.points:
            if p.draft_tokens and p.accepted_length is not None:
                rows = lengths.setdefault(p.draft_tokens, {})
                rows.setdefault(p.concurrent_requests, []).append(p.accepted_length - 1)
        shares: dict[int, list[float]] = {}
        for rows in lengths.values():
            alone = statistics.fmean(rows[min(rows)])
            for size, accepted in rows.items():
                if alone > 0:
                    share = min(statistics.fmean(accepted) / alone, 1.0)
                    shares.setdefault(size, []).append(share)
        if not shares:
            return 1.0
        sizes = sorted(shares)
        return float(np.interp(batch, sizes, [statistics.fmean(shares[size]) for size in sizes]))


def load(path: Path) -> Costs:
    """A file of rows. Raises UserError that names file and row."""
    fix = "docs/serving.md says how the engine's own bench fills it"
    try:
        value = parse_line(path.read_bytes())
    except OSError as error:
        raise UserError(f"costs: {path} cannot be read ({error.strerror}); give a file") from None
    except ValueError as error:
        raise UserError(f"costs: {path} {error}; {fix}") from None
    rows = value.get("points") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"costs: {path} holds no points; {fix}")
    engine = value.get("engine", "")
    points = tuple(_point(path, number, row) for number, row in enumerate(rows, 1))
    return Costs(engine if isinstance(engine, str) else "", points)


def _point(path: Path, number: int, row: Any) -> Point:
    """One row, checked. Raises UserError."""
    if isinstance(row, dict) and {"batch", "ms"} & row.keys():
        raise UserError(
            f"costs: {path}: point {number} is of an earlier version; batch is "
            "concurrent_requests now, ms (milliseconds) step_seconds (seconds)"
        )
    found, problems = from_json(row, Point)
    if not problems and (said := found.problem()):
        problems = [said]
    if problems:
        raise UserError(f"costs: {path}: point {number}: {problems[0]}")
    return found
