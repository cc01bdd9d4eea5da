"""The table of a fit, from fit.json alone, and the tables of docs/fit.md: one of several fits,
and one of several heads on every traffic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.scripts.fitting import verdict
from outrider.scripts.reports.table import Table, change, interval, number
from outrider.scripts.scoring.names import labels as short

Report = dict[str, Any]


def table(report: Report) -> Table:
    """Before against after, and what was decided."""
    head = ("prompts", "drafter", "accepted length", "against before", "speedup")
    start = report["start"]["path"] or f"a fresh {report['start']['kind']} head"
    title = f"{start}, fitted in {report['budget']['minutes']:g} min"
    return Table(head, lines(report), title, decided(report), words=(0, 1))


def lines(report: Report) -> list[list[str]]:
    """The rows of the table: later part and general prompts, with their categories."""
    found = []
    for part in ("later", "general"):
        if not report[part]:
            continue
        names = labels(report, part)
        for name, row in zip(names, report[part]["drafters"], strict=True):
            where, length = f"{part} ({report[part]['prompts']})", interval(row["accepted_length"])
            paired = report["start"]["path"] and name != "before"
            against = change(row["against_before"]) if paired else ""
            found.append([where, name, length, against, interval(row["speedup"], unit="×")])
            if name != "after" or len(row["by_category"]) < 2:
                continue
            for category, cell in row["by_category"].items():
                where, length = f"  {category} ({cell['prompts']})", cell["accepted_length"]
                against = change(cell["against_before"]) if paired else ""
                found.append([where, name, interval(length), against, ""])
    return found


def labels(report: Report, part: str) -> list[str]:
    """What the drafters of a part are called: before, after, scratch, or as they were named."""
    roles = [*(["before"] if report["start"]["path"] else []), "after"]
    roles += ["scratch"] if report["scratch"] else []
    rows = report[part]["drafters"]
    return [roles[i] if i < len(roles) else row["name"] for i, row in enumerate(rows)]


def decided(report: Report) -> list[str]:
    """What was decided and why, in lines."""
    training = report["training"]
    if not report["gain"]:
        found = ["kept: the new head; no start= was given to compare it with"]
    elif report["kept"] == "new":
        found = [f"kept: the new head, {change(report['gain'])} accepted length on the later part"]
    else:
        gain = change(report["gain"])
        why = "and only an interval above 0 would count"
        found = [f"kept: the OLD head: {gain} accepted length on the later part, {why}"]
    steps = report["budget"]["steps"]
    if training["steps"] < steps:
        found.append(
            f"stopped at step {training['steps']} of {steps}: accepted length no longer rose "
            f"(best at {training['best_step']})"
        )
    if report["general"] and report["gain"]:
        row = report["general"]["drafters"][1]
        found.append(f"on general prompts: {change(row['against_before'])}")
    if report["certificate"]:
        found.append(f"certificate: {report['certificate']['verdict']}")
    return found


def several(reports: Sequence[Report]) -> Table:
    """The table of docs/fit.md: a row for every fit and drafter of its own; heads that were
    put beside them have rows where they were fitted."""
    head = ("traffic", "drafter", "minutes", "later part", "against before", "general", "bytes")
    rows = []
    for report in reports:
        for i, name in enumerate(report["bytes"]):
            row = report["later"]["drafters"][i]
            general = report["general"]["drafters"][i] if report["general"] else None
            rank = lora_rank(report)
            kind = f"{name}, LoRA {rank}" if rank and i == 1 else name
            cells = [report["name"], kind, f"{report['budget']['minutes'] if i else 0:g}"]
            cells.append(interval(row["accepted_length"]))
            cells.append(change(row["against_before"]) if i else "")
            cells.append(change(general["against_before"]) if i and general else "")
            rows.append([*cells, f"{report['bytes'][name]:,}"])
    return Table(head, rows, words=(0, 1))


def lora_rank(report: Report) -> int:
    """Rank of the LoRA that a fit trained; 0 = all weights learned."""
    settings = report["settings"]
    return int(settings.get("head", settings)["lora"]["rank"])  # earlier fits had no `head`


def page(reports: Sequence[Report]) -> str:
    """The table of docs/fit.md with what it was measured on."""
    rows = [
        f"- {report['name']}: `{report['command']}`; {report['environment']['processor']}, "
        f"{report['environment']['threads']} threads, commit `{report['environment']['commit']}`; "
        f"{report['budget']['steps']} steps, kept the {report['kept']} head"
        for report in reports
    ]
    return "\n".join([several(reports).markdown(), "", *rows])


def forgotten(path: Path) -> Report:
    """From a report of evaluate.py (its path) whose categories are traffics: every drafter on
    each of them, against the first one, paired by prompt."""
    report = json.loads(path.read_text())
    names = [row["name"] for row in report["drafters"] if row["shape"] != "none"]
    origin = {key: report[key] for key in ("created", "command", "environment")}
    return {**origin, **verdict.compared(path, names)}


def matrix(report: Report) -> Table:
    """Drafters down, traffics across; accepted length, and what that is to the first."""
    rows = report["drafters"]
    names = list(rows[0]["by_category"])
    lines = []
    for at, (name, row) in enumerate(zip(short([r["name"] for r in rows]), rows, strict=True)):
        cells = []
        for category in names:
            cell = row["by_category"][category]
            length = number(cell["accepted_length"]["mean"])
            cells.append(f"{length}, {change(cell['against_before'])}" if at else length)
        lines.append([name, *cells])
    requested = [f"{name} ({rows[0]['by_category'][name]['prompts']})" for name in names]
    return Table(["drafter", *requested], lines)
