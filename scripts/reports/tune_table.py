"""The result of tuning as a table for the terminal, and the sentences that go with it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.reports.block import md_table
from scripts.reports.table import interval, number


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def title(report: dict[str, Any]) -> str:
    s = report["settings"]
    law = "greedy (T = 0)" if s["temperature"] == 0 else f"T = {s['temperature']:g}"
    return (
        f"{report['drafter']} on {report['target']['name']} · {law} · {s['dtype']} · "
        f"batch {s['batch_size']} · "
        f"{s['num_prompts']} prompts"
    )


HEADER = ("settings", "accepted length", "predicted", "tokens/s", "predicted", "error", "speedup")


def cells(report: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """(row, its cells) in the order of measured speed."""
    rows = sorted(report["rows"], key=lambda r: -(r["measured"]["tokens_per_second"] or 0))
    return [
        (
            r,
            [
                r["name"],
                interval(r["measured"]["accepted_length"]),
                number(r["predicted"]["accepted_length"]),
                number(r["measured"]["tokens_per_second"], 1),
                number(r["predicted_at_pace"], 1),
                percent(r["error"]),
                interval(r["measured"]["speedup"], 2, "×"),
            ],
        )
        for r in rows
    ]


def show(report: dict[str, Any], console: Console) -> None:
    """Print the measured settings, the chosen one marked, and what follows from it."""
    wide = console if console.is_terminal else Console(width=130)
    table = Table(
        title=title(report), title_justify="left", title_style="bold", header_style="bold"
    )
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row, line in cells(report):
        chosen = row["name"] == report["chosen"]["name"]
        mark = "▸ " if chosen else "  "
        table.add_row(mark + line[0], *line[1:], style="bold" if chosen else None)
    wide.print(table)
    for text in sentences(report):
        console.print(text, style="dim", highlight=False)


def sentences(report: dict[str, Any]) -> list[str]:
    """What a reader of the table must know."""
    chosen, plain = (
        report["chosen"],
        report["latency"]["fit"]["target_line"][str(report["settings"]["batch_size"])],
    )
    lines = []
    if chosen["pays"]:
        lines.append(
            f"Chosen: {chosen['name']}. Break-even: {chosen['break_even']:.2f} tokens "
            "per target pass; below "
            "that plain decoding is faster."
        )
    else:
        lines.append(
            "Nothing was faster than plain decoding here. The nearest is "
            f"{chosen['name']}; it would need "
            f"{chosen['break_even']:.2f} tokens per target pass."
        )
    lines.append(
        f"A target pass takes {plain['ms']:.1f} ms and {plain['ms_per_node']:.2f} ms "
        "more per node (straight "
        f"line through the curve); {report['searched']} settings were searched by replay."
    )
    lines.append(
        "Predictions are set to the pace at which plain decoding ran while measuring "
        f"({report['pace']:.2f} of the latency curve's); brackets: 95 % bootstrap over prompts."
    )
    pace = report["plain_pass_ms"]
    if not pace["steady"]:
        lines.append(
            f"UNSTEADY: a plain pass took {pace['low']:.0f} to {pace['high']:.0f} ms in "
            "this run; the machine "
            "was busy with other work, so choose again on a quiet one."
        )
    grid = report.get("grid")
    if grid:
        r, off = grid["chosen_over_best"], grid["error_proposed"]
        lines.append(
            f"Grid of {grid['settings']}: the choice runs at {interval(r, 3)} of the best measured "
            f"({grid['best']}); tokens/s of the proposed settings were predicted to "
            f"{off['mean']:.1%} on "
            f"average, {off['worst']:.1%} at worst."
        )
    return lines + [str(n) for n in report["notes"]]


COLLECTED = (
    "drafter",
    "chosen",
    "speedup",
    "settings searched",
    "measured",
    "choice / best measured",
    "tokens/s predicted, mean and worst error of the proposed settings",
    "break-even",
)


def markdown(known: dict[str, Any]) -> str:
    """What tuning runs with grid=true came to (the JSON of `results=`), a row per drafter."""
    rows = []
    for name, run in known.items():
        grid, chosen = run["grid"], run["chosen"]
        if grid is None:
            continue
        off = grid["error_proposed"]
        rows.append(
            [
                name,
                chosen["name"],
                interval(chosen["speedup"], 2, "×"),
                str(run["searched"]),
                str(grid["settings"]),
                interval(grid["chosen_over_best"], 3),
                f"{off['mean']:.1%}, {off['worst']:.1%}",
                f"{chosen['break_even']:.2f}",
            ]
        )
    return md_table(COLLECTED, rows, (0, 1))
