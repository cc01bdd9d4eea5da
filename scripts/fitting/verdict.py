"""Before against after, on the same prompts: ratios of accepted length, paired by prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode import stats
from outrider.scripts.scoring.score import plain

Row = dict[str, Any]


def rows_of(report: dict[str, Any]) -> dict[str, Row]:
    """The drafters of a report, by name."""
    return {row["name"]: row for row in report["drafters"]}


def ratio(after: Row, before: Row, category: str = "", seed: int = 0) -> dict[str, Any]:
    """Accepted length of `after` over that of `before`, {mean, low, high}, over the prompts of
    a category ("" = all) on which both have cycles that count, resampled by prompt. A prompt
    with cycles on one side only is no pair, and one alone allows no interval."""
    known = {p["prompt_id"]: p for p in before["per_prompt"]}
    pairs = [
        (p, known[p["prompt_id"]])
        for p in after["per_prompt"]
        if p["prompt_id"] in known and category in ("", p["category"])
    ]
    pairs = [pair for pair in pairs if pair[0]["cycles"] and pair[1]["cycles"]]
    work, cycles = (
        [[of(pair[side]) for pair in pairs] for side in (0, 1)] for of in (_tokens, _cycles)
    )
    found = stats.ratio_of_rates(work[0], cycles[0], work[1], cycles[1], seed)
    return plain(found.json())  # type: ignore[no-any-return]


def _tokens(prompt: Row) -> float:
    """Tokens of the cycles that count."""
    return float((prompt["accepted_length"] or 0.0) * prompt["cycles"])


def _cycles(prompt: Row) -> float:
    return float(prompt["cycles"])


def compared(path: Path, names: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """What a report (its path) says of drafters, the first of `names` being the one before.

    Raises UserError when one of the first two could not be scored."""
    report = json.loads(path.read_text())
    rows = rows_of(report)
    for name in names[:2]:
        if name not in rows:
            message = next((s["reason"] for s in report["skipped"] if s["name"] == name), "no row")
            raise UserError(f"start: {name} could not be scored ({message}); see {path}")
    before = rows[names[0]]
    drafters = []
    for name in names:
        if name not in rows:
            continue
        row = rows[name]
        categories = {
            category: {
                "prompts": found["prompts"],
                "accepted_length": found["accepted_length"],
                "against_before": ratio(row, before, category, seed),
            }
            for category, found in row["by_category"].items()
        }
        drafters.append(
            {
                "name": name,
                "accepted_length": row["accepted_length"],
                "against_before": ratio(row, before, "", seed),
                "speedup": row["speedup"],
                "bytes": row["bytes"],
                "by_category": categories,
            }
        )
    return {"prompts": len(before["per_prompt"]), "drafters": drafters}


def better(gain: dict[str, Any]) -> bool:
    """Whether the paired interval of a ratio lies above 1."""
    return gain["low"] is not None and gain["low"] > 1
