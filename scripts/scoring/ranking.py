"""From measured rows to a ranking. A rank is claimed only where it was measured: a row
ranks behind another one when the 95 % interval of their paired speed ratio is on one
side of 1. A row whose speed is in doubt (score.py: doubts) has none.
"""

from __future__ import annotations

from typing import Any

from outrider.heads.names import NONE


def believable(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ours, `none` among them, whose speed can be believed, the fastest first."""
    rows = [
        row
        for row in report["drafters"]
        if row["kind"] != "reference" and row["speedup"]["mean"] is not None and not row["doubts"]
    ]
    return sorted(rows, key=lambda row: -row["speedup"]["mean"])


def best(report: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest row that drafts and whose speed can be believed; None where there is
    none."""
    return next((row for row in believable(report) if row["name"] != NONE), None)


def claims(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(faster, slower) of every pair of drafters that the interval of their paired speed ratio
    parts."""
    found = []
    ranked = {row["name"] for row in believable(report)}
    for pair in report["pairs"]:
        low, high = pair["speed_ratio"]["low"], pair["speed_ratio"]["high"]
        if low is None or not {pair["a"], pair["b"]} <= ranked:
            continue
        if low > 1:
            found.append((pair["a"], pair["b"]))
        elif high < 1:
            found.append((pair["b"], pair["a"]))
    return found


def ranking(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that can be ranked, the fastest first: {name, label, rank, speedup, beaten_by,
    tied_with}. rank: 1 + how many rows are clearly faster, and never below that of a row
    above. beaten_by: rows that are clearly faster; tied_with: rows that are neither that
    nor clearly slower."""
    faster = set(claims(report))  # (a, b): a is clearly faster than b
    rows = believable(report)
    found: list[dict[str, Any]] = []
    for row in rows:
        beaten = [r["name"] for r in rows if (r["name"], row["name"]) in faster]
        tied = [
            r["name"]
            for r in rows
            if r is not row and r["name"] not in beaten and (row["name"], r["name"]) not in faster
        ]
        found.append(
            {
                "name": row["name"],
                "label": row["label"],
                "rank": max([1 + len(beaten), *(above["rank"] for above in found)]),
                "speedup": row["speedup"],
                "beaten_by": beaten,
                "tied_with": tied,
            }
        )
    return found
