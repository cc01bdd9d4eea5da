"""What several batch sizes tell together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def batches(reports: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Measured speedup by batch size of every drafter, the smallest batch first, at the
    temperature of the first report; {} for a single size."""
    known = list(reports)
    same = [r for r in known if r["settings"]["temperature"] == known[0]["settings"]["temperature"]]
    if len(same) < 2:
        return {}
    out: dict[str, list[dict[str, Any]]] = {}
    for report in same:
        for row in report["drafters"]:
            if row["shape"] != "none" and row["speedup"]["mean"] is not None:
                point = {
                    "batch_size": report["settings"]["batch_size"],
                    "speedup": row["speedup"]["mean"],
                    "low": row["speedup"]["low"],
                    "high": row["speedup"]["high"],
                    "doubts": row["doubts"],
                    "tokens_per_second": row["tokens_per_second"],
                }
                out.setdefault(row["label"], []).append(point)
    return {label: sorted(points, key=lambda p: p["batch_size"]) for label, points in out.items()}


def stops_paying(points: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Up to which of the measured batch sizes a drafter pays, of `batches`: pays_up_to, the
    largest one up to which every size is clearly faster than plain decoding (interval above
    1); stops_at, the smallest one from which on none is faster. None where no measured size
    is; a speed in doubt says neither."""
    known = sorted(points, key=lambda p: p["batch_size"])
    up_to = stops = None
    for p in known:
        if p["doubts"] or p["low"] is None or p["low"] <= 1:
            break
        up_to = p["batch_size"]
    for p in reversed(known):
        if p["doubts"] or p["speedup"] > 1:
            break
        stops = p["batch_size"]
    return {"pays_up_to": up_to, "stops_at": stops}
