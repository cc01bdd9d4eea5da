"""report.html: one file without network that one can open, mail, or hang on a wall. Drawn from
report.json alone, by templates/report.html.
"""

from __future__ import annotations

from typing import Any

from outrider.scripts.common.rendering import render
from outrider.scripts.reports import plots, score_table
from outrider.scripts.reports.table import Table, interval, number, ratio
from outrider.scripts.scoring.ranking import best

MOST = 6  # depths in the table of acceptance


def page(report: dict[str, Any]) -> str:
    """Return the whole page as text."""
    head, sub = headline(report)
    rows, colors, found = report["drafters"], plots.color_of(report), best(report["drafters"])
    scores = score_table.table(
        report,
        best=None if found is None else rows.index(found),
        dots=[colors[row["name"]] for row in rows],
    )
    return render(
        "report.html",
        report=report,
        head=head,
        sub=sub,
        cards=cards(report),
        scores=scores,
        ranking=score_table.ranking(report) if len(report["ranking"]) > 1 else None,
        drawn=[
            (plots.svg(plots.panel(name, report), name), f"{title}, {axis}")
            for name, (_, title, axis) in plots.PANELS.items()
        ],
        others=[score_table.table(one) for one in report.get("others") or []],
        depths=depths(report),
        pairs=pairs(report),
        same=score_table.SAME,
        facts=facts(report),
    )


def headline(report: dict[str, Any]) -> tuple[str, str]:
    """(title, line below): only what was measured and can be believed."""
    found, sub = best(report["drafters"]), score_table.title(report)
    if found is None:
        drawn = plots.drafting(report)
        return ("No speed here can be believed" if drawn else "Plain decoding, measured"), sub
    speed = interval(found["speedup"], 2, "×")
    if found["speedup"]["low"] > 1:
        return f"{found['label']}: {speed} over plain decoding", sub
    return f"No drafter is clearly faster here; {found['label']}: {speed} of plain decoding", sub


def cards(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(figure, what it is), those of the headline's row first."""
    rows, found = report["drafters"], best(report["drafters"])
    shown = []
    if found:
        label = found["label"]
        shown = [
            (number(found["speedup"]["mean"]) + "×", f"decoding speed, {label}"),
            (number(found["accepted_length"]["mean"]), f"mean accepted length, {label}"),
            (number(found["tokens_per_second"], 1), f"tokens/s, {label}"),
        ]
    checked = [r["lossless"] for r in rows if r.get("lossless") and r["name"] != "none"]
    if checked:
        same, total, near = (
            sum(c[key] for c in checked) for key in ("equal", "checked", "within_rounding")
        )
        words = "answers equal plain decoding, token by token"
        shown.append((f"{same}/{total}", words + (f"; {near} more up to rounding" if near else "")))
    return [*shown, (f"{sum(r['tokens'] for r in rows):,}", "tokens measured")]


def depths(report: dict[str, Any]) -> Table | None:
    """Return acceptance at every depth of the draft, given that the depth before was accepted."""
    rows = [r for r in report["drafters"] if r["acceptance_by_position"]]

    def cell(row: dict[str, Any], depth: int) -> str:
        found = (p for p in row["acceptance_by_position"] if p["position"] == depth)
        share = next((p["conditional_interval"] for p in found), None)
        return interval(share and {k: v and 100 * v for k, v in share.items()}, 0)

    most = range(1, 1 + min(MOST, max((len(r["acceptance_by_position"]) for r in rows), default=0)))
    columns: list[tuple[str, Any]] = [("drafter", lambda r: r["label"])]
    columns += [(f"d = {d}", lambda r, d=d: cell(r, d)) for d in most]
    return Table.of(columns, rows) if rows else None


def pairs(report: dict[str, Any]) -> Table | None:
    """Paired differences between the drafters; nothing for fewer than two."""
    found = [p for p in report["pairs"] if p.get("accepted_length_difference")]
    label = {r["name"]: r["label"] for r in report["drafters"]}
    columns = [
        ("pair", lambda p: f"{label[p['a']]} against {label[p['b']]}"),
        ("accepted length, difference", lambda p: interval(p["accepted_length_difference"])),
        ("speed, ratio", lambda p: ratio(p["speed_ratio"], p["doubts"])),
    ]
    return Table.of(columns, found) if found else None


def facts(report: dict[str, Any]) -> list[Table]:
    """Return the target (its hashes shortened, without a folder of this machine), how
    everything was decoded, and the machine."""
    target = {
        key: value[:16] if key.endswith("sha256") else value
        for key, value in report["target"].items()
        if key != "path"
    }
    left_out = ("target", "drafters", "device")
    settings = {key: value for key, value in report["settings"].items() if key not in left_out}
    prompts = settings["prompts"]
    settings["prompts"] = f"{prompts['path']} (sha256 {prompts['sha256'][:12]})"
    environment = {**report["environment"], **report["environment"]["versions"]}
    del environment["versions"]
    return [Table.listed(about) for about in (target, settings, environment)]
