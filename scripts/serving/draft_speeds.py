"""How fast llama.cpp was with a draft beside the same server without one: what was
measured here, from the JSON of docs/results. The page for its users and the export to it
say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.heads.interop.engines import WORDS
from outrider.scripts.common import files

RESULTS = files.ROOT / "docs" / "results"
# servers beside our own drafters, on the same prompts
RACES = ("unseen-t0", "avx2-t0", "qwen25-more-t0", "qwen25-t0")
SETTINGS = ("engine-settings", "engine-forecast")  # by draft tokens and requests at a time
PLAIN = "llamacpp"
# a server with a draft: its label without one, the kind of head, K
LABEL = re.compile(rf"({PLAIN}[\w-]*)-({'|'.join(WORDS)})(?:-k(\d+))?")


@dataclass(frozen=True)
class DraftSpeed:
    """One measured row. source: its file in docs/results. target: its name. drafter: kind of
    head. server: build
    and weights as the file names them. machine: processor and threads. draft_tokens: K, 0
    where the file does not say. requests: decoded at a time. length: accepted, the bonus
    token counted. times: speed against the same server without it."""

    source: str
    target: str
    drafter: str
    server: str
    machine: str
    draft_tokens: int
    requests: int
    length: float
    times: float


def speeds(results: Path = RESULTS) -> list[DraftSpeed]:
    """Every row that is there; [] without the files."""
    return [*_raced(results), *_by_settings(results)]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _machine(report: dict[str, Any]) -> str:
    env = report["environment"]
    threads = env["threads"]
    return f"{env['processor']}, {threads} thread{'s' if threads != 1 else ''}"


def _raced(results: Path) -> Iterator[DraftSpeed]:
    for name in RACES:
        report = _read(results / f"{name}.json")
        rows = {row["label"]: row for row in report.get("drafters", [])}
        for label, row in rows.items():
            found = LABEL.fullmatch(label)
            if found and found[1] in rows:
                yield DraftSpeed(
                    source=name,
                    target=report["target"]["name"],
                    drafter=found[2],
                    server=found[1],
                    machine=_machine(report),
                    draft_tokens=int(found[3] or 0),
                    requests=1,
                    length=row["accepted_length"]["mean"],
                    times=row["tokens_per_second"] / rows[found[1]]["tokens_per_second"],
                )


def _by_settings(results: Path) -> Iterator[DraftSpeed]:
    for name in SETTINGS:
        report = _read(results / f"{name}.json")
        for case in report.get("cases", []):
            yield DraftSpeed(
                source=name,
                target=report["target"]["name"],
                drafter=report["settings"]["kind"],
                server=f"{PLAIN}-{report['settings']['dtype']}",
                machine=_machine(report),
                draft_tokens=case["draft_tokens"],
                requests=case["batch"],
                length=case["accepted_length"]["measured"],
                times=case["measured"],
            )


def summary(results: Path = RESULTS) -> str:
    """One sentence for whoever exports to llama.cpp; "" without figures."""
    found = speeds(results)
    if not found:
        return ""
    times, lengths = [row.times for row in found], [row.length for row in found]
    sources = ", ".join(dict.fromkeys(f"docs/results/{row.source}.json" for row in found))
    drafters = " or ".join(sorted({WORDS[row.drafter] for row in found}))
    slower = sum(row.times < 1 for row in found)
    best = max(found, key=lambda row: row.times)
    depth = f", {best.draft_tokens} draft tokens" if best.draft_tokens else ""
    return (
        f"measured in llama.cpp here, on CPUs: with {drafters} {min(times):.2f} to "
        f"{max(times):.2f} times the speed of the same server without a draft, slower in {slower} "
        f"of {len(found)} settings (accepted length {min(lengths):.2f} to {max(lengths):.2f}; the "
        f"fastest: {best.target}{depth}; "
        f"{sources}); time both on your machine before you serve it"
    )
