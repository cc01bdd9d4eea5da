"""From measured rows to a ranking. A rank is claimed only where it was measured: a row stands
behind another one when the 95 % interval of their paired speed ratio lies on one side of 1.
Rows that none is clearly faster than share a rank.
"""

from __future__ import annotations

from typing import Any


def claims(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(faster, slower) of every pair of drafters that the interval of their paired speed ratio
    parts."""
    found = []
    ranked = {row["name"] for row in report["drafters"] if row["kind"] != "reference"}
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
    """Rows that draft, the fastest first: {name, label, rank, speedup, beaten_by, tied_with}.
    beaten_by: rows that are clearly faster; tied_with: rows of the same rank from which this
    one cannot be told apart."""
    faster = set(claims(report))  # (a, b): a is clearly faster than b
    rows = [
        r
        for r in report["drafters"]
        if r["kind"] != "reference" and r["tokens_per_second"] is not None
    ]
    rows.sort(key=lambda r: -r["tokens_per_second"])
    found = []
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
                "rank": 1 + len(beaten),
                "speedup": row["speedup"],
                "beaten_by": beaten,
                "tied_with": tied,
            }
        )
    return sorted(found, key=lambda row: row["rank"])  # stable: the faster first
