"""The result of tuning as a table, and the sentences that go with it."""

from __future__ import annotations

from typing import Any

from outrider.scripts.reports.score_table import busy, distribution_of, requested, unsteady
from outrider.scripts.reports.table import Columns, Table, interval, number, percent

HEADER = ("settings", "accepted length", "predicted", "tokens/s", "predicted", "error", "speedup")


def table(report: dict[str, Any]) -> Table:
    """The measured settings in the order of their speed, the chosen one marked."""
    s, where = report["settings"], f"{report['drafter']} on {report['target']['name']}"
    rows = sorted(report["rows"], key=lambda r: -(r["measured"]["tokens_per_second"] or 0))
    return Table(
        HEADER,
        [_line(row, row["measured"]) for row in rows],
        f"{where} · {distribution_of(s['temperature'])} · {requested(s)}",
        sentences(report),
        best=[row["name"] for row in rows].index(report["chosen"]["name"]),
    )


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


def in_doubt(report: dict[str, Any]) -> list[str]:
    """The names of measured settings whose speed is in doubt (score_table.unsteady)."""
    rows = [(row["name"], row["measured"]["speedup"]) for row in report["rows"]]
    return unsteady(report["plain_pass_ms"], rows)


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
        lines.append(busy(pace, in_doubt(report), "Choose again on a quiet machine."))
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


def collected(known: dict[str, Any]) -> Table:
    """What tuning came to beside a grid of settings that were all measured
    (docs/results/tune.json), a row per drafter."""
    return Table.of(COLLECTED, [{"name": name, **run} for name, run in known.items()], words=(0, 1))
