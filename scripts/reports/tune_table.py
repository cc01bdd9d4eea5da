"""The result of tuning as a table, and the sentences that go with it."""

from __future__ import annotations

from typing import Any

from outrider.scripts.reports.score_table import distribution_of, doubted, even, requested, stalls
from outrider.scripts.reports.table import Columns, Table, interval, number, ratio

COLUMNS: Columns = (
    ("settings", lambda row: row["name"] + (" (default)" if row["default"] else "")),
    ("accepted length", lambda row: interval(row["measured"]["accepted_length"])),
    ("tokens/s", lambda row: number(row["measured"]["tokens_per_second"], 1)),
    ("speedup", lambda row: ratio(row["measured"]["speedup"], row["measured"]["doubts"])),
    ("break even", lambda row: even(row["measured"]["break_even"])),
)


def table(report: dict[str, Any]) -> Table:
    """Return the measured settings in the order of their speed, the chosen one marked."""
    s, where = report["settings"], f"{report['drafter']} on {report['target']['name']}"
    rows = sorted(report["rows"], key=lambda r: -(r["measured"]["tokens_per_second"] or 0))
    return Table.of(
        COLUMNS,
        rows,
        title=f"{where} · {distribution_of(s['temperature'])} · {requested(s)}",
        notes=sentences(report),
        best=[row["name"] for row in rows].index(report["chosen"]["name"]),
    )


def sentences(report: dict[str, Any]) -> list[str]:
    """Return what a reader of the table must know."""
    chosen = report["chosen"]
    doubts = {row["name"]: row["measured"]["doubts"] for row in report["rows"]}
    said = f"Chosen: {chosen['name']}."
    if not chosen["pays"]:
        none = "Nothing was faster than plain decoding beyond chance here"
        none = "No speed can be believed here" if doubts[chosen["name"]] else none
        said = f"{none}. The nearest is {chosen['name']}."
    return [
        said,
        f"{len(report['tried'])} settings were tried, the fastest of them interleaved with plain "
        "decoding; brackets: 95 % bootstrap over prompts.",
        *stalls(report["stalls"]),
        *doubted(doubts),
    ]
