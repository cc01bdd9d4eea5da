"""The result of tuning as a table for the terminal, and the sentences that go with it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from scripts.reports.block import Columns, md_of, shown_table
from scripts.reports.table import asked, interval, law_of, number, unsteady


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def title(report: dict[str, Any]) -> str:
    s = report["settings"]
    where = f"{report['drafter']} on {report['target']['name']}"
    return f"{where} · {law_of(s['temperature'])} · {asked(s)}"


HEADER = ("settings", "accepted length", "predicted", "tokens/s", "predicted", "error", "speedup")


def cells(report: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """(row, its cells) in the order of measured speed."""
    rows = sorted(report["rows"], key=lambda r: -(r["measured"]["tokens_per_second"] or 0))
    return [(row, _line(row, row["measured"])) for row in rows]


def _line(row: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        interval(measured["accepted_length"]),
        number(row["predicted"]["accepted_length"]),
        number(measured["tokens_per_second"], 1),
        number(row["predicted_at_pace"], 1),
        percent(row["error"]),
        interval(measured["speedup"], 2, "×"),
    ]


def show(report: dict[str, Any], console: Console) -> None:
    """Print the measured settings, the chosen one marked, and what follows from it."""
    wide = console if console.is_terminal else Console(width=130)
    table = shown_table(title(report), HEADER)
    for row, line in cells(report):
        chosen = row["name"] == report["chosen"]["name"]
        mark = "▸ " if chosen else "  "
        table.add_row(mark + line[0], *line[1:], style="bold" if chosen else None)
    wide.print(table)
    for text in sentences(report):
        console.print(text, style="dim", highlight=False)


def sentences(report: dict[str, Any]) -> list[str]:
    """What a reader of the table must know."""
    chosen, batch = report["chosen"], str(report["settings"]["batch_size"])
    plain = report["latency"]["fit"]["target_line"][batch]
    lines = []
    if chosen["pays"]:
        lines.append(
            f"Chosen: {chosen['name']}. Break-even: {chosen['break_even']:.2f} tokens per target "
            "pass; below that plain decoding is faster."
        )
    else:
        lines.append(
            f"Nothing was faster than plain decoding here. The nearest is {chosen['name']}; it "
            f"would need {chosen['break_even']:.2f} tokens per target pass."
        )
    lines.append(
        f"A target pass takes {plain['ms']:.1f} ms and {plain['ms_per_node']:.2f} ms more per node "
        f"(straight line through the curve); {report['searched']} settings were searched by replay."
    )
    lines.append(
        "Predictions are set to the pace at which plain decoding ran while measuring "
        f"({report['pace']:.2f} of the latency curve's); brackets: 95 % bootstrap over prompts."
    )
    pace = report["plain_pass_ms"]
    if not pace["steady"]:
        lines.append(f"{unsteady(pace)}, so choose again on a quiet one.")
    return lines + [str(n) for n in report["notes"]]


def _errors(run: dict[str, Any]) -> str:
    off = run["grid"]["error_proposed"]
    return f"{off['mean']:.1%}, {off['worst']:.1%}"


COLLECTED: Columns = (
    ("drafter", lambda run: run["name"]),
    ("chosen", lambda run: run["chosen"]["name"]),
    ("speedup", lambda run: interval(run["chosen"]["speedup"], 2, "×")),
    ("settings searched", lambda run: str(run["searched"])),
    ("measured", lambda run: str(run["grid"]["settings"])),
    ("choice / best measured", lambda run: interval(run["grid"]["chosen_over_best"], 3)),
    ("tokens/s predicted, mean and worst error of the proposed settings", _errors),
    ("break-even", lambda run: f"{run['chosen']['break_even']:.2f}"),
)


def markdown(known: dict[str, Any]) -> str:
    """What tuning came to beside a grid of settings that were all measured
    (docs/results/tune.json), a row per drafter."""
    return md_of(COLLECTED, [{"name": name, **run} for name, run in known.items()], (0, 1))
