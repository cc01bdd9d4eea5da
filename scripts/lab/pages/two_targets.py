"""What drafting brings on every real target, in one table, from reports of `evaluate` and of
`engines.py race` in docs/results. A row of a target that no report has is left out by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.scripts.reports.table import Table, interval, number
from outrider.scripts.scoring.names import SERVER

FITTED = "EAGLE-3 fitted to SQL"
# What is compared -> labels of its rows in reports; of several the fastest is taken.
ROWS = {
    "plain decoding": r"none",
    "n-gram": r"ngram(@\d+)?",
    "EAGLE-3": r"eagle3[\w@:]*",
    "EAGLE-3 and n-gram together": r"eagle3[\w@:]*\+ngram[\w@]*",
    FITTED: r"fit_sql[\w@:]*(\+ngram(@\d+)?)?",
    "`generate` of transformers": r"hf_generate",
    "llama.cpp, 16 bits": r"llamacpp(_native)?(-b?float16)?",
    "llama.cpp, 16 bits, with the head": r"llamacpp(_native)?(-b?float16)?-eagle3\w*(-k\d+)?",
    "llama.cpp, Q4_K_M": r"llamacpp(_native)?-q4_k_m",
    "llama.cpp, Q4_K_M, with the head": r"llamacpp(_native)?-q4_k_m-eagle3\w*(-k\d+)?",
}
# name in the table -> reports of docs/results, those that are preferred first
TARGETS = {
    "SmolLM2-135M": ("avx2-t0", "avx2-drafts32-t0", "unseen-t0", "avx2-fit"),
    "Qwen2.5-Coder-1.5B": (
        "qwen25-adaptive-t0",
        "qwen25-more-t0",
        "qwen25-t0",
        "qwen25-fit-t0",
        "qwen25-generate-t0",
    ),
}


def rows_of(report: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    """The rows of that label."""
    return [row for row in report["drafters"] if re.fullmatch(pattern, row["label"])]


def source(pattern: str, reports: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first report that has a row of that label."""
    return next((report for report in reports if rows_of(report, pattern)), None)


def found(pattern: str, reports: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest row of that label in the first report that has one."""
    report = source(pattern, reports)
    if report is None:
        return None
    return max(rows_of(report, pattern), key=lambda row: row["tokens_per_second"] or 0.0)


def _ran(report: dict[str, Any]) -> str:
    """Where and in which numbers a report was made."""
    settings, machine = report["settings"], report["environment"]["processor"]
    day = report["created"][:10]
    return f"in {settings['dtype']}, {settings['num_prompts']} prompts, {machine}, {day}"


def _other_prompts(pattern: str, reports: Sequence[dict[str, Any]]) -> str:
    """How many prompts a row's report asked where they are not those of the first report; ""
    where they are."""
    report = source(pattern, reports)
    if report is None:
        return ""
    ours, first = report["settings"], reports[0]["settings"]
    same = ours.get("prompts") == first.get("prompts")
    return "" if same else f"{ours['num_prompts']} other prompts"


def _length(row: dict[str, Any]) -> str:
    return interval(row["accepted_length"]) if row["accepted_length"]["mean"] else "–"


def _cells(row: dict[str, Any] | None) -> Iterator[str]:
    """Accepted length, tokens/s and the speed against plain decoding of the same report."""
    if row is None:
        yield from ("–", "–", "–")
        return
    plain = row["label"] == "none" or (
        SERVER.fullmatch(row["name"]) and "eagle" not in row["label"]
    )
    yield "–" if plain or row["label"] == "hf_generate" else _length(row)
    yield number(row["tokens_per_second"], 1)
    yield interval(row["speedup"], 2, "×")


def table(known: Mapping[str, dict[str, Any]]) -> Table:
    """All targets with a report. known: docs/results by name."""
    by_target = {
        name: [known[one] for one in names if one in known] for name, names in TARGETS.items()
    }
    by_target = {name: reports for name, reports in by_target.items() if reports}
    head, lines, missing = ["T = 0"], [], []
    for name in by_target:
        head += [f"{name}: accepted length", "tokens/s", "× plain decoding"]
    for what, pattern in ROWS.items():
        rows = {name: found(pattern, reports) for name, reports in by_target.items()}
        lost = [name for name, row in rows.items() if row is None]
        missing += [f"{what} on {name}" for name in lost]
        if len(lost) < len(rows):
            lines.append([what, *(cell for row in rows.values() for cell in _cells(row))])
    notes = [
        "of drafters and servers that ran in several ways the fastest; every speed against plain "
        "decoding of the same run; tokens/s of two targets come from different runs: "
        + ", ".join(f"{name} {_ran(reports[0])}" for name, reports in by_target.items())
    ]
    others = {
        f"{what} on {name}": _other_prompts(pattern, reports)
        for what, pattern in ROWS.items()
        if what != FITTED
        for name, reports in by_target.items()
    }
    notes += [f"{row}: {said}" for row, said in others.items() if said]
    if any(cells[0] == FITTED for cells in lines):
        notes += ["a fitted head, and plain decoding beside it, answered later questions in SQL"]
    missing += [f"all of {name}" for name in TARGETS if name not in by_target]
    notes += [f"not measured: {', '.join(missing)}"] if missing else []
    return Table(head, lines, "targets beside each other", notes)
