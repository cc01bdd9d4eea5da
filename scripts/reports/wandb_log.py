"""A report to wandb, only when asked for: a table of scores, figures, and numbers under the
names train/, eval/ and speed/. `wandb=` means what it means to a training run
(train/trackers.py)."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import first_line
from outrider.train.trackers import no_reports

# First parts of a row's keys. All others are of evaluation.
TRAINING = ("training", "parameters", "bytes")
SPEEDS = (
    *("tokens_per_second", "tokens_per_second_interval", "speedup", "end_to_end", "break_even"),
    *("draft_ms", "draft_ms_interval", "verify_ms", "verify_ms_interval", "target_ms"),
    *("target_passes", "prefill_seconds", "ms_per_token", "breakdown", "peak_bytes"),
)
SCORES = {
    "drafter": ("label",),
    "accepted length": ("accepted_length", "mean"),
    "low": ("accepted_length", "low"),
    "high": ("accepted_length", "high"),
    "tokens/s": ("tokens_per_second",),
    "speedup": ("speedup", "mean"),
    "end to end": ("end_to_end", "speedup", "mean"),
}


def to_wandb(report: dict[str, Any], out: Path, job: str, mode: str, project: str) -> None:
    """Log a report and the PNGs under OUT/figures.

    mode: "online" or "offline". Trouble with wandb (not installed, no account, no network)
    costs a line on stderr and no more: the report is written by then.
    """
    no_reports(mode)
    try:
        import wandb

        about = {"job_type": job, "config": report["settings"], "dir": str(out), "mode": mode}
        with wandb.init(project=project, **about) as run:
            run.summary.update(summary(report))
            charts = sorted((out / "figures").glob("*.png"))
            drawn = {f"figures/{path.stem}": wandb.Image(str(path)) for path in charts}
            scores = [[_at(row, keys) for keys in SCORES.values()] for row in scored(report)]
            table = {"eval/drafters": wandb.Table(columns=[*SCORES], data=scores)} if scores else {}
            run.log({**drawn, **table})
    except Exception as error:  # as in train.trackers.Tracker
        print(f"wandb: not used ({first_line(error)}); the report is in {out}", file=sys.stderr)


def scored(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an evaluation's report."""
    return [row for row in report.get("drafters") or [] if "accepted_length" in row]


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Every number of the rows by GROUP/DRAFTER/KEY, no speed that is in doubt among them,
    and who accepted most."""
    found: dict[str, Any] = {}
    for row in report.get("drafters") or report.get("rows") or []:
        measured = row.get("measured", row)
        for key, value in flat(measured).items():
            if measured["doubts"] and group(key) == "speed":
                continue
            found[f"{group(key)}/{row.get('label', row['name'])}/{key}"] = value
    drafting = [
        (row["accepted_length"]["mean"], row["name"])
        for row in scored(report)
        if row["shape"] != "none" and row["accepted_length"]["mean"] is not None
    ]
    if drafting:
        found["best_accepted_length"], found["best_drafter"] = max(drafting)
    return found


def group(key: str) -> str:
    """Of a dotted key of a row."""
    first = key.partition(".")[0]
    return "speed" if first in SPEEDS else "train" if first in TRAINING else "eval"


def _at(row: dict[str, Any], keys: Sequence[str]) -> Any:
    found: Any = row
    for key in keys:
        found = found[key]
    return found


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of nested mappings under dotted names."""
    out: dict[str, float] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            out |= flat(item, f"{prefix}{key}.")
        elif isinstance(item, numbers.Real) and not isinstance(item, bool):
            out[prefix + key] = float(item)
    return out
