"""The files of a tuning run: tune.json, tune.html (one file, no network) and figures/*.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.scripts.common import files
from outrider.scripts.reports import plots, tune_table, tuning_plots
from outrider.scripts.reports.rendering import (
    Drawing,
    about_environment,
    about_target,
    listed,
    render,
)
from outrider.scripts.reports.table import number, percent
from outrider.scripts.scoring import names

UNTOLD = ("target", "prompts_sha256", "device", "out")  # settings that the page leaves out


def write(report: dict[str, Any], out: Path) -> None:
    """Write everything, tune.json last: where it is, the others are."""
    drawn = {
        "tuning": {
            _label(report): {
                "curves": report["curves"],
                "rows": report["rows"],
                "latency": report["latency"]["fit"],
                "samples": report["latency"]["samples"],
            }
        },
        **{k: report[k] for k in ("breakdown", "acceptance")},
    }
    panels = tuning_plots.present(tuning_plots.TUNE, drawn)
    for name, (draw, _) in panels.items():
        files.write_bytes(out / "figures" / f"{name}.png", plots.png(plots.figure(draw, drawn)))
    figures = [
        Drawing(plots.svg(plots.figure(draw, drawn), name), words)
        for name, (draw, words) in panels.items()
    ]
    files.write_text(out / "tune.html", html(report, figures))
    files.write_json(out / "tune.json", report)


def _label(report: dict[str, Any]) -> str:
    return names.label(report["drafter"])


def headline(report: dict[str, Any]) -> str:
    """What came out, and no more than was measured."""
    chosen = report["chosen"]
    if not chosen["pays"]:
        return f"{_label(report)} is not faster here: plain decoding is faster"
    best = f"{_label(report)} drafts best as {chosen['name']}"
    if chosen["name"] in tune_table.in_doubt(report):
        return f"{best}, on a machine too busy to time"
    return f"{best}: {chosen['speedup']['mean'] or 0.0:.2f}× plain decoding"


def html(report: dict[str, Any], figures: list[Drawing]) -> str:
    """The page as text."""
    chosen, measured = report["chosen"], tune_table.table(report)
    row = next(row for row in report["rows"] if row["name"] == chosen["name"])
    cards = [
        (f"{chosen['speedup']['mean'] or 0.0:.2f}×", "decoding speed, measured"),
        (number(row["measured"]["accepted_length"]["mean"]), "tokens per target pass"),
        (f"{chosen['break_even']:.2f}", "tokens per pass to break even"),
        (percent(row["error"]), "error of the prediction"),
        (f"{report['searched']:,}", "settings searched"),
    ]
    settings = listed({k: v for k, v in report["settings"].items() if k not in UNTOLD})
    return render(
        "tune.html",
        report=report,
        head=headline(report),
        sub=measured.title,
        cards=cards,
        measured=measured,
        drawn=figures,
        facts=[about_target(report), settings, about_environment(report)],
    )
