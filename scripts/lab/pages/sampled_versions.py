"""The table of sampled speculation by engine and version in docs/engines.md, rendered from
docs/results/engine-versions.json and, of engines that are not installed any more, from the dated
reports of their certificates; a test compares them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.scripts.common import files
from outrider.scripts.reports.block import Block
from outrider.scripts.reports.table import Table, number

RESULTS = files.ROOT / "docs/results/engine-versions.json"
BLOCK = Block.of("docs/engines.md", "sampled by version", "scripts/lab/serving/versions.py")
OLDER = ("engines-llamacpp-sampled", "engines-vllm-sampled", "engines-vllm-mended-sampled")
MENDED = "engines-vllm-mended-sampled"
LABELS = {"xllamacpp": "llama.cpp", "vllm": "vLLM"}
HEAD = (
    *("engine", "version", "target", "draft", "seed", "tokens", "drafted"),
    *("p", "controls rejected", "bias surely found", "verdict", "date"),
)


def read() -> list[dict[str, Any]]:
    """The rows that are there."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """The table."""
    cells = [[*_row(row)] for row in rows]
    for name in OLDER:
        report = json.loads((RESULTS.parent / f"{name}.json").read_text())
        cells += [[*_older(report, case, name == MENDED)] for case in report["cases"]]
    return Table(HEAD, cells, words=(0, 1, 2, 3, -2, -1)).markdown() + "\n"


def _row(row: dict[str, Any]) -> Iterator[str]:
    yield from (row["engine"], f"`{row['version']}`", "tiny", row["draft"], str(row["seed"]))
    yield f"{row['tokens']:,}"
    yield f"{row['drafted'] or 0:,}"
    yield f"{row['p']:.2g}"
    yield f"{row['controls_rejected']} of {row['controls']}"
    yield number(row["min_detectable"])
    yield _verdict(row["verdict"], row["draft"], row["reasons"])
    yield row["created"][:10]


def _verdict(verdict: str, draft: str, reasons: list[str]) -> str:
    """The control speculates with nothing, so its certificate is undecided at best."""
    if verdict == "not lossless":
        return f"**{verdict}**"
    if draft == "none":
        return "control passed"
    return verdict if verdict == "lossless" else f"{verdict}: {reasons[0]}"


def _older(report: dict[str, Any], case: dict[str, Any], mended: bool) -> Iterator[str]:
    ((package, version),) = report["engine"].items()
    layers = {layer["name"]: layer for layer in case["layers"]}
    said = layers["sampling"]
    controls = case["negative_controls"]
    yield LABELS[package]
    yield f"`{version}`" + (", mended" if mended else "")
    yield "SmolLM2"
    yield case["case"]
    yield str(report["settings"]["seed"])
    yield f"{said['tokens']:,}"
    yield f"{case['drafted'] or 0:,}"
    yield f"{said['p']:.2g}"
    yield f"{sum(c['rejected'] for c in controls)} of {len(controls)}"
    yield number(case["min_detectable"])
    yield _verdict(case["verdict"], case["case"], case["reasons"])
    yield report["created"][:10]


def refresh() -> None:
    """Put the table into the page."""
    BLOCK.write(render(read()))
