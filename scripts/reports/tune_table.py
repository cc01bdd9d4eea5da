"""The result of tuning as a table, and the sentences that go with it."""

from __future__ import annotations

from typing import Any

from outrider.scripts.reports.score_table import distribution_of, even, requested, speed, stalls
from outrider.scripts.reports.table import DOUBT, Columns, Table, interval, number

NO_FASTER = "Nothing was faster than plain decoding"
COLUMNS: Columns = (
    ("settings", lambda row: row["name"]),
    ("accepted length", lambda row: interval(row["measured"]["accepted_length"])),
    ("replayed", lambda row: number(row["replayed"])),
    ("tokens/s", lambda row: number(row["measured"]["tokens_per_second"], 1)),
    ("speedup", lambda row: speed(row["measured"])),
    ("breaks even at", lambda row: even(row["measured"]["break_even"])),
)


def table(report: dict[str, Any]) -> Table:
    """The measured settings in the order of their speed, the chosen one marked."""
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
    """What a reader of the table must know."""
    chosen = report["chosen"]
    doubts = {row["name"]: row["measured"]["doubts"] for row in report["rows"]}
    nothing = "No speed can be believed" if doubts[chosen["name"]] else NO_FASTER
    lines = [
        f"Chosen: {chosen['name']}."
        if chosen["pays"]
        else f"{nothing} here. The nearest is {chosen['name']}.",
        f"{report['replayed']} settings were replayed along the target's own answers, "
        f"{len(report['timed'])} of them timed, these measured in turns; brackets: 95 % bootstrap "
        "over prompts.",
    ]
    lines += stalls(report["stalls"])
    lines += [
        f"IN DOUBT {DOUBT}: the speed of {name}: {why}."
        for name, why_of in doubts.items()
        for why in why_of
    ]
    return lines + [str(n) for n in report["notes"]]
