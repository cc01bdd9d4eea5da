"""From measured rows to a ranking. A rank is claimed only where it was measured: a row ranks
behind another one when the 95 % interval of their paired speed ratio is on one side of 1. A row
whose speed is in doubt (score.py: doubts) has none, and a ratio in doubt parts no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.heads.names import NONE


def believable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of ours, `none` among them, whose speed can be believed, the fastest
    first."""
    known = [
        row
        for row in rows
        if row["kind"] != "reference" and row["speedup"]["mean"] is not None and not row["doubts"]
    ]
    return sorted(known, key=lambda row: -row["speedup"]["mean"])


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest row that drafts and whose speed can be believed; None where there
    is none."""
    return next((row for row in believable(rows) if row["name"] != NONE), None)


def ranking(
    rows: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return rows of a report that can be ranked, the fastest first: {name, rank, tied_with}.
    rank: 1 + how many rows are clearly faster, and never below that of a row above. tied_with:
    rows that are neither clearly faster nor slower. pairs: of the same report."""
    faster = set()  # (a, b): a is clearly faster than b
    for pair in pairs:
        low, high = pair["speed_ratio"]["low"], pair["speed_ratio"]["high"]
        if not pair["doubts"] and low is not None and (low > 1 or high < 1):
            faster.add((pair["a"], pair["b"]) if low > 1 else (pair["b"], pair["a"]))
    names = [row["name"] for row in believable(rows)]
    found: list[dict[str, Any]] = []
    for name in names:
        beaten = sum((other, name) in faster for other in names)
        tied = [n for n in names if n != name and not {(n, name), (name, n)} & faster]
        rank = max([1 + beaten, *(above["rank"] for above in found)])
        found.append({"name": name, "rank": rank, "tied_with": tied})
    return found
