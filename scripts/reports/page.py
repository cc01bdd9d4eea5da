"""report.html: one file without network that one can open, mail, or hang on a wall. Drawn from
report.json alone, by templates/report.html.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from outrider.scripts.reports import plots, score_table
from outrider.scripts.reports.rendering import (
    Drawing,
    about_environment,
    about_target,
    listed,
    render,
)
from outrider.scripts.reports.score_table import DEPTHS as MOST
from outrider.scripts.reports.score_table import Row, by_depth, ranks
from outrider.scripts.reports.table import Table, interval, number
from outrider.scripts.scoring.batches import stops_paying
from outrider.scripts.scoring.ranking import best


def page(report: dict[str, Any]) -> str:
    """The whole page as text."""
    head, sub = headline(report)
    timed = [r for r in report["drafters"] if r.get("breakdown")]
    return render(
        "report.html",
        report=report,
        head=head,
        sub=sub,
        cards=cards(report),
        scores=marked(report),
        ranking=score_table.ranking(report) if len(report["ranking"]) > 1 else None,
        drawn=drawings(report),
        times=Table.of(score_table.TIMES, timed) if timed else None,
        sources="; ".join(dict.fromkeys(r["breakdown"]["source"] for r in timed)),
        batches=batches(report),
        others=others(report),
        depths=depths(report),
        costs=Table.of(score_table.COSTS, report["drafters"]),
        pairs=pairs(report),
        same=score_table.SAME,
        facts=[about_target(report), settings(report), about_environment(report)],
    )


def drawings(report: dict[str, Any]) -> list[Drawing]:
    """The figures of a report, in order."""
    return [
        Drawing(plots.svg(plots.panel(name, report), name), described(name, report))
        for name in plots.PANELS
    ]


BARS = {
    "speedup": ("Speed against plain decoding", "×"),
    "accepted_length": ("Tokens per target pass", ""),
}
WORDS = {
    "acceptance_by_position": "Acceptance by depth in the draft, a line per drafter.",
    "accepted_length_by_category": "Accepted length by category with intervals, a dot per drafter.",
}


def described(name: str, report: dict[str, Any]) -> str:
    """A figure in words, with the numbers that it shows."""
    if name in WORDS:
        return WORDS[name]
    title, unit = BARS[name]
    known = [r for r in report["drafters"] if r.get(name) and r[name]["mean"] is not None]
    texts = [f"{r['label']} {score_table.speed(r) if unit else interval(r[name])}" for r in known]
    return f"{title}: {'; '.join(texts)}"


def headline(report: dict[str, Any]) -> tuple[str, str]:
    """(title, line below): only what was measured and can be believed."""
    found, sub = best(report), score_table.title(report)
    if found is None:
        drawn = plots.drafting(report)
        return ("No speed here can be believed" if drawn else "Plain decoding, measured"), sub
    speed = interval(found["speedup"], 2, "×")
    if found["speedup"]["low"] > 1:
        return f"{found['label']} makes {report['target']['name']} {speed} as fast", sub
    if found["speedup"]["high"] < 1:
        what = f"the fastest, {found['label']}, runs at {speed} plain decoding"
        return f"No drafter is faster here: {what}", sub
    return f"{found['label']}: {speed} plain decoding, not clearly faster on this machine", sub


def cards(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(figure, what it is), those of the headline's row first."""
    rows, found = report["drafters"], best(report)
    facts = []
    if found:
        label = found["label"]
        length = number(found["accepted_length"]["mean"])
        facts.append((number(found["speedup"]["mean"]) + "×", f"decoding speed, {label}"))
        facts.append((length, f"tokens per target pass, {label}"))
        facts.append((number(found["tokens_per_second"], 1), f"tokens/s, {label}"))
    checked = [r["lossless"] for r in rows if r.get("lossless") and r["name"] != "none"]
    if checked:
        same, total = sum(c["equal"] for c in checked), sum(c["checked"] for c in checked)
        near = sum(c["within_rounding"] for c in checked)
        words = "answers equal plain decoding, token by token"
        facts.append((f"{same}/{total}", words + (f"; {near} more up to rounding" if near else "")))
    facts.append((f"{sum(r['tokens'] for r in rows):,}", "tokens measured"))
    return facts


def marked(report: dict[str, Any]) -> Table:
    """The score table, the fastest row marked, with the colour that each row has in
    figures."""
    rows, colors, found = report["drafters"], plots.color_of(report), best(report)
    dots = [colors[row["name"]] for row in rows]
    return score_table.table(report, best=None if found is None else rows.index(found), dots=dots)


DEPTHS: dict[str, Callable[[Row, int], str]] = {
    "Accepted at d, given that d − 1 was, %": lambda r, d: by_depth(r, "conditional", d),
    "Accepted up to d, of all cycles, %": lambda r, d: by_depth(r, "unconditional", d),
    "Place of the accepted candidate among its siblings, trees: 1st 2nd 3rd 4th, %": ranks,
}


def depths(report: dict[str, Any]) -> list[tuple[str, Table]]:
    """Acceptance at every depth, conditional and unconditional, and which of the siblings was
    accepted in trees: (title, table).
    """
    rows = [r for r in report["drafters"] if r["acceptance_by_position"]]
    if not rows:
        return []
    most = range(1, 1 + min(MOST, max(len(r["acceptance_by_position"]) for r in rows)))
    parts = []
    for title, cell in DEPTHS.items():
        shown = [r for r in rows if any(cell(r, d) != "–" for d in most)]
        if shown:
            columns: list[tuple[str, Any]] = [("drafter", lambda r: r["label"])]
            columns += [(f"d = {d}", lambda r, cell=cell, d=d: cell(r, d)) for d in most]
            parts.append((title, Table.of(columns, shown)))
    return parts


def batches(report: dict[str, Any]) -> Table | None:
    """Speedup by batch size, and the batch at which speculation stops paying."""
    found = report.get("batches") or {}
    if not found:
        return None
    sizes = sorted({p["batch_size"] for points in found.values() for p in points})

    def cell(size: int, row: dict[str, Any]) -> str:
        point = next((p for p in row["points"] if p["batch_size"] == size), None)
        if point is None:
            return "–"
        return score_table.speed({**point, "speedup": {**point, "mean": point["speedup"]}})

    def verdict(row: dict[str, Any]) -> str:
        at = stops_paying(row["points"])["stops_at"]
        if at is None:
            return f"not up to {sizes[-1]}"
        return "is never faster" if at == sizes[0] else f"batch {at}"

    columns: list[tuple[str, Any]] = [("drafter", lambda r: r["label"])]
    columns += [(f"batch {size}", functools.partial(cell, size)) for size in sizes]
    columns += [
        ("stops paying at", verdict),
        ("clearly faster up to", lambda r: str(stops_paying(r["points"])["pays_up_to"] or "–")),
    ]
    rows = [{"label": label, "points": points} for label, points in found.items()]
    return Table.of(columns, rows)


def others(report: dict[str, Any]) -> list[tuple[str, Table]]:
    """The tables of the other settings of the same run: (folder, table)."""
    return [
        (
            one["folder"],
            Table.of(score_table.columns_of(one), one["drafters"], title=score_table.title(one)),
        )
        for one in report.get("others") or []
    ]


def pairs(report: dict[str, Any]) -> Table | None:
    """Paired differences between the drafters; nothing for fewer than two."""
    found = [p for p in report["pairs"] if p.get("accepted_length_difference")]
    if not found:
        return None
    label = {r["name"]: r["label"] for r in report["drafters"]}
    columns = [
        ("pair", lambda p: f"{label[p['a']]} against {label[p['b']]}"),
        (
            "accepted length, difference",
            lambda p: interval(p["accepted_length_difference"]),
        ),
        ("speed, ratio", lambda p: interval(p["speed_ratio"], 2, "×")),
    ]
    return Table.of(columns, found)


def settings(report: dict[str, Any]) -> Table:
    """How everything was decoded."""
    known = {
        k: v for k, v in report["settings"].items() if k not in ("target", "drafters", "device")
    }
    prompts = known["prompts"]
    known["prompts"] = f"{prompts['path']} (sha256 {prompts['sha256'][:12]})"
    return listed(known)
