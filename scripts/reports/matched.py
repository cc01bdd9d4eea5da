"""The matched table: heads that learned from the same conversations with the same arithmetic,
scored on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.fitting.verdict import ratio, rows_of
from scripts.reports.block import md_table
from scripts.reports.fit_table import change
from scripts.reports.table import interval

Report = dict[str, Any]
SHAPES = ("chain", "tree")
SHOWN = 4  # tokens of a chain whose acceptance is told
ASKED = ("prompts", "num_prompts", "max_new_tokens", "batch_size", "dtype")
REFERENCE = "eagle3"  # the head that the others are compared with, paired by prompt


def matched(trained: Report, drafters: Mapping[str, str], reports: Mapping[str, Report]) -> Report:
    """What scripts/train_heads.py knows of its heads joined with how they scored. trained:
    heads.json; drafters: by head, the folder that was scored; reports: by temperature, the
    report of scripts/evaluate.py with every folder as a chain and as a tree.

    {"data_sha256", "asked": {temperature: what was asked}, "heads": {name: {steps, flops,
    tokens, cpu_seconds, "scores": {temperature: {shape: {accepted_length, against, speedup,
    draft_ms, conditional}}}}}}; `against` is the ratio of accepted length to the reference's
    same shape, `conditional` the acceptance by position given that the one before was
    accepted."""
    heads: dict[str, Any] = {}
    for name, folder in drafters.items():
        known = trained["heads"][name]
        learned: dict[str, Any] = {}
        scores: dict[str, Any] = {}
        for temperature, report in reports.items():
            rows = rows_of(report)
            scores[temperature] = {}
            for shape in SHAPES:
                row = rows.get(f"{folder}@{shape}")
                if row is None:  # skipped, and the report says why
                    continue
                learned = row["training"] or learned
                first = rows.get(f"{drafters.get(REFERENCE, '')}@{shape}")
                scores[temperature][shape] = {
                    "accepted_length": row["accepted_length"],
                    "against": ratio(row, first) if first else None,
                    "speedup": row["speedup"],
                    "draft_ms": row["draft_ms"],
                    "conditional": [p["conditional"] for p in row["acceptance_by_position"]],
                }
        heads[name] = {
            **known,
            "tokens": learned.get("tokens_seen"),
            "cpu_seconds": learned.get("cpu_seconds"),
            "scores": scores,
        }
    asked = {
        temperature: {key: report["settings"][key] for key in ASKED}
        for temperature, report in reports.items()
    }
    return {"data_sha256": trained["data_sha256"], "asked": asked, "heads": heads}


def markdown(found: Report) -> str:
    """What the heads cost, then a table of scores for every temperature."""
    temperatures = next(iter(found["heads"].values()))["scores"]
    return "\n\n".join([costs(found), *(scores(found, each) for each in temperatures)])


def costs(found: Report) -> str:
    """What every head learned from, and how often each of its first tokens is accepted where
    the one before was: of its chain, at the first temperature."""
    places = [f"token {k}" for k in range(1, SHOWN + 1)]
    columns = ["head", "steps", "10¹² FLOPs", "million tokens", "core minutes", *places]
    rows = []
    for name, head in found["heads"].items():
        chain = next(iter(head["scores"].values())).get("chain")
        known = [c for c in chain["conditional"] if c is not None][:SHOWN] if chain else []
        cells = [
            name,
            f"{head['steps']:,}",
            f"{head['flops'] / 1e12:.0f}",
            _scaled(head["tokens"], 1e6, 2),
            _scaled(head["cpu_seconds"], 60, 0),
            *(f"{chance:.0%}" for chance in known),
            *["–"] * (SHOWN - len(known)),
        ]
        rows.append(cells)
    return md_table(columns, rows)


def scores(found: Report, temperature: str) -> str:
    """A row for every head: accepted length with its interval, the paired ratio to the
    reference, milliseconds of drafting a cycle and speedup, as a chain and as a tree."""
    columns = [f"T = {temperature}"]
    for shape in SHAPES:
        columns += [shape, f"to {REFERENCE}", "draft ms", "speedup"]
    rows = []
    for name, head in found["heads"].items():
        cells = [name]
        for shape in SHAPES:
            score = head["scores"][temperature].get(shape)
            if score is None:
                cells += ["–"] * 4
                continue
            cells += [
                interval(score["accepted_length"]),
                change(score["against"]) if name != REFERENCE else "",
                _scaled(score["draft_ms"], 1, 1),
                interval(score["speedup"], 2, "×"),
            ]
        rows.append(cells)
    return md_table(columns, rows)


def title(found: Report) -> str:
    """At which budget, what was asked, and what somebody noted beside it ("note")."""
    budget = max(head["flops"] for head in found["heads"].values())
    asked = "; ".join(
        f"T = {temperature}: {each['num_prompts']} prompts × {each['max_new_tokens']} tokens, "
        f"batch {each['batch_size']}, {each['dtype']}"
        for temperature, each in found["asked"].items()
    )
    told = f"{budget / 1e12:.0f} × 10¹² floating point operations of the draft each; {asked}"
    return f"{told}. {found['note']}" if found.get("note") else told


def _scaled(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"
