"""What is best where other numbers of rows are decoded together than the one that the choice is
made for: every setting is priced for them as well, and the best of each is measured beside plain
decoding. Where more rows share a pass a drafted token costs more of it, so that drafting pays at
few rows and often loses at many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.heads.tuned import DraftSettings
from outrider.scripts.tuning.search import Candidate


def proposed(found: Sequence[Candidate], chosen: DraftSettings, batch: int) -> list[DraftSettings]:
    """What is worth measuring for `batch` rows: the fastest settings by prediction, the fastest
    chain, and what is best for the number of rows that was chosen for."""
    ranked = sorted(found, key=lambda one: -one.speedups[batch])
    chains = [one for one in ranked if one.kind == "chain"]
    return list(dict.fromkeys([*(one.settings for one in (*ranked[:1], *chains[:1])), chosen]))


def judged(batch: int, settings: dict[str, DraftSettings], rows: dict[str, Any]) -> dict[str, Any]:
    """An entry of the report's `batches`. rows: what was measured of every name of `settings`, and
    of plain decoding under "none"."""
    name = max(settings, key=lambda name: rows[name]["tokens_per_second"] or 0.0)
    message = ("tokens_per_second", "speedup", "accepted_length")
    return {
        "batch_size": batch,
        "name": name,
        "settings": listed(settings[name]),
        "break_even": break_even(rows, name),
        "speedup": rows[name]["speedup"],
        "pays": (rows[name]["speedup"]["mean"] or 0) > 1,
        "measured": [{"name": one, **{k: rows[one][k] for k in message}} for one in settings],
    }


def break_even(rows: dict[str, Any], name: str) -> float:
    """Measured: how many tokens a cycle must commit to cost no more per token than plain
    decoding.
    """
    per_cycle = {n: rows[n]["draft_ms"] + rows[n]["verify_ms"] for n in ("none", name)}
    return max(per_cycle[name] / per_cycle["none"], 1.0) if per_cycle["none"] else 1.0


def listed(one: DraftSettings) -> dict[str, Any]:
    """Settings as JSON has them: lists in place of tuples."""
    return json.loads(json.dumps(one.to_json()))  # type: ignore[no-any-return]
