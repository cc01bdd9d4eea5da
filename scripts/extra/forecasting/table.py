"""A forecast as tables for the terminal and for docs/fit.md."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.reports.block import md_table
from scripts.reports.table import interval, number


def show(value: dict[str, Any], console: Console) -> None:
    """The text's statistics, then a row for every head and budget."""
    found = value["text"]
    if found["tokens"]:
        console.print(
            f"{found['tokens']} tokens of the target's answers: entropy {found['entropy']:.2f} "
            f"nats, highest probability {found['top1']:.2f}; prompt lookup, which needs no "
            f"training: accepted length {interval(found['ngram'])}",
            highlight=False,
        )
    batches = [row["batch"] for row in value["forecasts"][0]["by_batch"]]
    table = Table(title=f"forecast for {value['target']}, 90 % intervals · {value['engine']}")
    table.add_column("head", no_wrap=True)
    table.add_column("tokens", no_wrap=True, justify="right")
    table.add_column("hours", no_wrap=True, justify="right")
    table.add_column("accepted length")
    for batch in batches:
        table.add_column(f"speedup at {batch}")
    table.add_column("train it?")
    for row in value["forecasts"]:
        cells = [row["head"], f"{row['tokens'] / 1e6:.3g} M", number(row["hours"], 1)]
        cells.append(interval(row["accepted_length"]))
        for one in row["by_batch"]:
            pays = f"pays from {number(one['break_even'])}"
            cells.append(f"{interval(one['speedup'], 2, '×')}\n{pays}")
        table.add_row(*cells, advice(row))
    console.print(table)


def advice(row: dict[str, Any]) -> str:
    """One word for all batch sizes, or by batch size where they differ."""
    words = [one["pays"] for one in row["by_batch"]]
    if len(set(words)) == 1:
        return str(words[0])
    return ", ".join(f"{one['pays']} at {one['batch']}" for one in row["by_batch"])


CHECKED = ("head", "tokens", "forecast (90 %)", "measured (95 %)", "error", "inside")


def show_check(value: dict[str, Any], console: Console) -> None:
    """Every forecast beside what came; misses stay."""
    table = Table(title=f"forecast of {value['forecast']['created']} against truth")
    for name in CHECKED:
        table.add_column(name)
    for row in value["rows"]:
        table.add_row(*checked(row))
    console.print(table)
    console.print(f"{value['inside']} of {value['of']} inside", highlight=False)


def markdown_check(value: dict[str, Any]) -> str:
    """The same as Markdown."""
    rows = [checked(row) for row in value["rows"]]
    return f"{md_table(CHECKED, rows)}\n\n{value['inside']} of {value['of']} lengths lay inside"


def checked(row: dict[str, Any]) -> list[str]:
    """The cells of a head that was forecast."""
    return [
        row["head"],
        f"{row['tokens'] / 1e6:.3g} M",
        interval(row["forecast"]),
        interval(row["measured"]),
        f"{row['error']:+.1%}",
        "yes" if row["inside"] else "no",
    ]
