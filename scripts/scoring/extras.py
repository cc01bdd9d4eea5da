"""What belongs into a report beside its rows: how the heads learned, and what several batch
sizes tell together.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import records
from outrider.heads.drafters import settings_folder
from outrider.scripts.scoring import names
from outrider.scripts.scoring.contest import System


def extras(systems: Iterable[System]) -> dict[str, Any]:
    """{"learning": label -> evaluations by step} of a report's drafters; one that is no head,
    and one without a log, is left out. Never raises for what lies there."""
    learning: dict[str, Any] = {}
    for draft in [part for system in systems if system.draft for part in system.draft.each]:
        try:
            folder = settings_folder(draft)
        except UserError:
            # Sound when the system was made: what happened to it since costs no measured report.
            continue
        points = evaluations(folder) if folder is not None else []
        if len(points) > 1:
            learning.setdefault(names.label(draft.source), points)
    return {"learning": learning}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Decoded accepted length by step, from metrics.jsonl of the run that a head folder
    belongs to; the last of each step. [] without a log."""
    for place in (folder, folder.parent, folder.parent.parent):
        log = place / "metrics.jsonl"
        if log.is_file():
            break
    else:
        return []
    found: dict[int, dict[str, Any]] = {}
    try:
        for entry in records(log):
            if entry.get("event") == "eval" and isinstance(
                entry.get("accepted_length"), int | float
            ):
                found[int(entry["step"])] = {
                    k: entry.get(k) for k in ("step", "accepted_length", "low", "high")
                }
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return [found[step] for step in sorted(found)]


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
                    "tokens_per_second": row["tokens_per_second"],
                }
                out.setdefault(row["label"], []).append(point)
    return {label: sorted(points, key=lambda p: p["batch_size"]) for label, points in out.items()}


def stops_paying(points: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Up to which of the measured batch sizes a drafter pays, of `batches`: pays_up_to, the
    largest one up to which every size is clearly faster than plain decoding (interval above
    1); stops_at, the smallest one from which on none is faster. None where no measured size
    is."""
    known = sorted(points, key=lambda p: p["batch_size"])
    up_to = stops = None
    for p in known:
        if p["low"] is None or p["low"] <= 1:
            break
        up_to = p["batch_size"]
    for p in reversed(known):
        if p["speedup"] > 1:
            break
        stops = p["batch_size"]
    return {"pays_up_to": up_to, "stops_at": stops}
