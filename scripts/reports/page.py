"""report.html: one file without network that one can open, mail, or hang on a wall. Drawn from
report.json alone, by templates/report.html.
"""

from __future__ import annotations

import base64
from typing import Any

from outrider.scripts.common.rendering import render
from outrider.scripts.reports import plots, score_table
from outrider.scripts.reports.table import Table, interval
from outrider.scripts.scoring.ranking import best


def page(report: dict[str, Any], pictures: dict[str, bytes]) -> str:
    """Return the whole page as text. pictures: as of plots.drawn."""
    head, sub = headline(report)
    rows, found = report["drafters"], best(report["drafters"])
    return render(
        "report.html",
        report=report,
        head=head,
        sub=sub,
        scores=score_table.table(report, best=None if found is None else rows.index(found)),
        drawn=[
            (base64.b64encode(picture).decode(), ", ".join(plots.PANELS[name][1:]))
            for name, picture in pictures.items()
        ],
        others=[score_table.table(one) for one in report.get("others") or []],
        words=score_table.WORDS,
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
