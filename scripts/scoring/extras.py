"""What stands beside a drafter on disk and belongs into a report: what tuning measured, how
the head learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conf.errors import UserError
from heads import settings_folder, tuned
from scripts.scoring import names
from scripts.scoring.contest import Lane


def extras(lanes: Iterable[Lane]) -> dict[str, Any]:
    """{"tuning": label -> curves, rows, latency; "learning": label -> evaluations by step} of
    a report's drafters; a drafter that is no head, and one without a tuning or a log, is left
    out. Never raises for what lies there."""
    tuning: dict[str, Any] = {}
    learning: dict[str, Any] = {}
    for lane in lanes:
        if lane.draft is None:
            continue
        try:
            folder = settings_folder(lane.draft)
            if folder is None:
                continue
            found = tuned.read(folder)
        except UserError:
            # Sound when the lane was made: what happened to it since costs no measured report.
            continue
        label = names.label(lane.draft.source)
        told = measured(found.evidence) if found else None
        if told:
            tuning.setdefault(label, told)
        points = evaluations(folder)
        if len(points) > 1:
            learning.setdefault(label, points)
    return {"tuning": tuning, "learning": learning}


def measured(evidence: dict[str, Any]) -> dict[str, Any] | None:
    """Curves, rows and latency of decode.json's evidence, every number checked; None where
    anything is amiss: the file is foreign, and a report can do without it."""
    try:
        curves = {
            kind: [{k: float(v) for k, v in p.items()} for p in evidence["curves"].get(kind, ())]
            for kind in ("chain", "tree")
        }
        batch = [
            {k: float(p[k]) for k in ("batch_size", "speedup")}
            for p in evidence["curves"].get("batch", ())
        ]
        target = {
            str(int(b)): [[float(n), float(ms)] for n, ms in knots]
            for b, knots in evidence["latency"]["target"].items()
        }
        rows = []
        for row in evidence["rows"]:
            size = row["settings"]
            speed = {
                k: None if v is None else float(v) for k, v in row["measured"]["speedup"].items()
            }
            rows.append(
                {
                    "name": str(row["name"]),
                    "kind": "chain" if row["kind"] == "chain" else "tree",
                    "settings": {k: int(size[k]) for k in ("depth", "nodes") if size.get(k)},
                    "predicted_at_pace": float(row["predicted_at_pace"]),
                    "measured": {
                        "tokens_per_second": float(row["measured"]["tokens_per_second"]),
                        "speedup": {k: speed.get(k) for k in ("mean", "low", "high")},
                    },
                }
            )
        for kind, key in (("chain", "depth"), ("tree", "nodes")):
            if any(not {key, "speedup"} <= p.keys() for p in curves[kind]):
                return None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return (
        {"curves": {**curves, "batch": batch}, "latency": {"target": target}, "rows": rows}
        if target
        else None
    )


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
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("event") == "eval" and isinstance(
                entry.get("accepted_length"), int | float
            ):
                found[int(entry["step"])] = {
                    k: entry.get(k) for k in ("step", "accepted_length", "low", "high")
                }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # a log that is being written may end in half a line
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
