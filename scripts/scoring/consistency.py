"""Do two runs of the scoreboard agree? From report.json alone: of every row that both reports
have, the 95 % intervals of accepted length, tokens/s and speedup overlap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import UserError
from scripts.scoring.names import SERVER

METRICS = {
    "accepted_length": "accepted length",
    "tokens_per_second_interval": "tokens/s",
    "speedup": "speedup",
}
SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "dtype",
    "batch_size",
    "num_prompts",
    "seed",
    "verify",
)


def read(place: str) -> dict[str, Any]:
    """The report of a folder or of a report.json.

    Raises UserError when it cannot be read or is no score report."""
    path = Path(place).expanduser()
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); give a folder that evaluate.py wrote"
        ) from None
    try:
        for row in report["drafters"]:
            for metric in METRICS:
                cells = row[metric]
                [None if cells[k] is None else float(cells[k]) for k in ("mean", "low", "high")]
        report["settings"]["prompts"]["sha256"], report["target"]["name"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: is no report of a scoreboard; give a folder that evaluate.py wrote"
        ) from None
    return report  # type: ignore[no-any-return]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Settings under which two reports are of different things."""
    found = [
        f"{k}: {a['settings'].get(k)} against {b['settings'].get(k)}"
        for k in SAME
        if a["settings"].get(k) != b["settings"].get(k)
    ]
    if a["settings"]["prompts"]["sha256"] != b["settings"]["prompts"]["sha256"]:
        found.append("prompts: different files")
    if a["target"].get("weights_sha256") != b["target"].get("weights_sha256"):
        found.append(f"target: {a['target']['name']} against {b['target']['name']}, other weights")
    return found


def agreement(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """{rows: [{name, label, metrics: {metric: {a, b, change, overlap}}, agrees}], only_in_one,
    agrees}. A metric without an interval agrees where the means are the same, and is left open
    (None) elsewhere."""
    mine, theirs = (_named(r["drafters"]) for r in (a, b))
    rows = []
    for name in (n for n in mine if n in theirs):
        metrics = {m: _compared(mine[name][m], theirs[name][m]) for m in METRICS}
        verdicts = [cell["overlap"] for cell in metrics.values()]
        rows.append(
            {
                "name": mine[name]["name"],
                "label": mine[name]["label"],
                "metrics": metrics,
                "agrees": False if False in verdicts else None if None in verdicts else True,
            }
        )
    return {
        "rows": rows,
        "only_in_one": sorted(mine.keys() ^ theirs.keys()),
        "agrees": bool(rows) and all(row["agrees"] is not False for row in rows),
    }


def _named(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by name. A server is known by what it is called, where no other row is: it may have
    been started at another port."""
    full = [row["name"] for row in rows]
    called = [server[1] if (server := SERVER.fullmatch(name)) else name for name in full]
    short = [
        one if called.count(one) == 1 else name for one, name in zip(called, full, strict=True)
    ]
    return dict(zip(short, rows, strict=True))


def _compared(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    overlap = True if a["mean"] == b["mean"] else None
    if all(x[k] is not None for x in (a, b) for k in ("low", "high")):
        overlap = a["low"] <= b["high"] and b["low"] <= a["high"]
    change = b["mean"] / a["mean"] - 1 if a["mean"] and b["mean"] is not None else None
    return {"a": a, "b": b, "change": change, "overlap": overlap}
