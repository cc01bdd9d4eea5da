"""A forecast as tables for the terminal and for docs/fit.md."""

from __future__ import annotations

from typing import Any

from outrider.scripts.reports.table import Table, interval, number


def table(value: dict[str, Any]) -> Table:
    """A row for every head and budget; the text's statistics below."""
    found, rows = value["text"], []
    for row in value["forecasts"]:
        cells = [row["head"], f"{row['tokens'] / 1e6:.3g} M", number(row["hours"], 1)]
        cells.append(interval(row["accepted_length"]))
        for one in row["by_batch"]:
            pays = f"faster from {number(one['break_even'])}"
            cells.append(f"{interval(one['speedup'], 2, '×')}\n{pays}")
        rows.append([*cells, advice(row)])
    speedups = [f"speedup at {one['batch']}" for one in value["forecasts"][0]["by_batch"]]
    head = ["head", "tokens", "hours", "accepted length", *speedups, "train it?"]
    title = f"forecast for {value['target']}, 90 % intervals · {value['engine']}"
    message = (
        f"{found['tokens']} tokens of the target's answers: entropy {found['entropy']:.2f} "
        f"nats, highest probability {found['top1']:.2f}; prompt lookup, which needs no "
        f"training: accepted length {interval(found['ngram'])}"
        for _ in range(bool(found["tokens"]))
    )
    return Table(head, rows, title, [*message], words=(0, -1))


def advice(row: dict[str, Any]) -> str:
    """One word for all batch sizes, or by batch size where they differ."""
    words = [one["pays"] for one in row["by_batch"]]
    if len(set(words)) == 1:
        return str(words[0])
    return ", ".join(f"{one['pays']} at {one['batch']}" for one in row["by_batch"])


CHECKED = ("head", "tokens", "forecast (90 %)", "measured (95 %)", "error", "inside")


def check(value: dict[str, Any]) -> Table:
    """Every forecast beside what came; misses stay."""
    title = f"forecast of {value['forecast']['created']} against truth"
    notes = [f"{value['inside']} of {value['of']} lengths lay inside"]
    return Table(CHECKED, [checked(row) for row in value["rows"]], title, notes)


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
