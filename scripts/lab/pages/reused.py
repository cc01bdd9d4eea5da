"""More conversations or more passes over them, measured (docs/results/data-scaling.json by
scripts/lab/data_scaling.py), for docs/data.md."""

from __future__ import annotations

from typing import Any

from outrider.scripts.reports.table import Table, interval


def text(report: dict[str, Any], where: str) -> str:
    """The block of the page. where: on which machine, and the file."""
    said, found = report["prediction"], report["measured"]
    points = sorted(report["points"], key=lambda point: (point["share"], point["passes"]))
    rows = [[*_read(point), interval(point), ""] for point in points]
    rows.append([*_read(found), interval(found), interval(said)])
    lengths = ("accepted length (95 %)", "foretold (90 %)")
    head = ("tokens of the text", "passes", "tokens read", *lengths)
    lies = "inside" if report["inside"] else "outside"
    return "\n".join(
        [
            Table(head, rows, words=()).markdown(),
            "",
            f"All further passes together are worth {report['reuse']:.2g} first ones at most, by "
            f"the fit. The last head was foretold, and frozen, before it was trained: {lies} the "
            f"interval ({where}).",
        ]
    )


def _read(point: dict[str, Any]) -> list[str]:
    unique, read = (f"{round(point[key], -3):,.0f}" for key in ("unique_tokens", "tokens_seen"))
    return [unique, str(point["passes"]), read]
