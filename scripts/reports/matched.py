"""The matched table: heads that learned from the same conversations with the same arithmetic,
scored on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.fitting.verdict import ratio, rows_of
from scripts.reports.fit_table import change
from scripts.reports.table import interval

Report = dict[str, Any]
SHAPES = ("chain", "tree")
REFERENCE = "eagle3"  # the head that the others are compared with, paired by prompt


def matched(trained: Report, drafters: Mapping[str, str], reports: Mapping[str, Report]) -> Report:
    """What scripts/train_heads.py knows of its heads joined with how they scored. trained:
    heads.json; drafters: by head, the folder that was scored; reports: by temperature, the
    report of scripts/evaluate.py with every folder as a chain and as a tree.

    {"data_sha256", "prompts", "heads": {name: {steps, flops, tokens, cpu_seconds, "scores":
    {temperature: {shape: {accepted_length, against, speedup, draft_ms, conditional}}}}}};
    `against` is the ratio of accepted length to the reference's same shape, `conditional` the
    acceptance by position given that the one before was accepted."""
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
    some = next(iter(reports.values()))
    asked = {key: some["settings"][key] for key in ("prompts", "num_prompts", "max_new_tokens")}
    return {"data_sha256": trained["data_sha256"], "asked": asked, "heads": heads}


def markdown(found: Report) -> str:
    """A row for every head; accepted length with its interval, and the paired ratio to the
    reference."""
    temperatures = list(next(iter(found["heads"].values()))["scores"])
    columns = ["head", "steps", "10¹² FLOPs", "million tokens", "core minutes"]
    for temperature in temperatures:
        for shape in SHAPES:
            columns += [f"{shape}, T = {temperature}", f"to {REFERENCE}", "draft ms"]
    rule = "|".join(["---", *["---:"] * (len(columns) - 1)])
    lines = [f"| {' | '.join(columns)} |", f"|{rule}|"]
    for name, head in found["heads"].items():
        cells = [
            name,
            f"{head['steps']:,}",
            f"{head['flops'] / 1e12:.0f}",
            _scaled(head["tokens"], 1e6, 2),
            _scaled(head["cpu_seconds"], 60, 0),
        ]
        for temperature in temperatures:
            for shape in SHAPES:
                score = head["scores"][temperature].get(shape)
                if score is None:
                    cells += ["–"] * 3
                    continue
                against = change(score["against"]) if name != REFERENCE else ""
                cells += [
                    interval(score["accepted_length"]),
                    against,
                    _scaled(score["draft_ms"], 1, 1),
                ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def slots(found: Report, temperature: str = "0", shape: str = "chain", most: int = 4) -> str:
    """Acceptance of every position given that the one before was accepted."""
    lines = [f"| head | {' | '.join(f'slot {k}' for k in range(1, most + 1))} |"]
    lines.append(f"|---|{'---:|' * most}")
    for name, head in found["heads"].items():
        score = head["scores"][temperature].get(shape)
        known = [c for c in score["conditional"] if c is not None][:most] if score else []
        cells = [f"{value:.0%}" for value in known]
        cells += ["–"] * (most - len(cells))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _scaled(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"
