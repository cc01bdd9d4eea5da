"""A report to wandb, only when asked for: a table of scores, figures, and numbers under the
names eval/ and speed/. `wandb=` means what it means to a training run
(train/trackers.py)."""

from __future__ import annotations

import numbers
import sys
from pathlib import Path
from typing import Any

from outrider.conf.errors import first_line
from outrider.train.trackers import no_reports

# Keys of a row that tell its speed. All others are of evaluation.
SPEEDS = ("tokens_per_second", "speedup", "end_to_end", "break_even", "draft_ms", "verify_ms")


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
            logged: dict[str, Any] = {
                f"figures/{path.stem}": wandb.Image(str(path)) for path in charts
            }
            if rows := [_scores(row) for row in report.get("drafters", ())]:
                values = [[*row.values()] for row in rows]
                logged["eval/drafters"] = wandb.Table(columns=[*rows[0]], data=values)
            run.log(logged)
    except Exception as error:  # as in train.trackers.Tracker
        print(f"wandb: not used ({first_line(error)}); the report is in {out}", file=sys.stderr)


def _scores(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the table."""
    length = row["accepted_length"]
    return {
        "drafter": row["label"],
        "accepted length": length["mean"],
        "low": length["low"],
        "high": length["high"],
        "tokens/s": row["tokens_per_second"],
        "speedup": row["speedup"]["mean"],
        "end to end": row["end_to_end"]["speedup"]["mean"],
    }


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return every number of the rows by GROUP/DRAFTER/KEY, no speed that is in doubt among
    them, and who accepted most."""
    found: dict[str, Any] = {}
    lengths = []
    for row in report.get("drafters") or report.get("rows") or ():
        label, measured = row.get("label", row["name"]), row.get("measured", row)
        for key, value in flat(measured).items():
            group = "speed" if key.partition(".")[0] in SPEEDS else "eval"
            found[f"{group}/{label}/{key}"] = value
        if "label" in row and row["shape"] != "none" and row["accepted_length"]["mean"] is not None:
            lengths.append((row["accepted_length"]["mean"], row["name"]))
    if lengths:
        found["best_accepted_length"], found["best_drafter"] = max(lengths)
    return found


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return numbers of nested mappings under dotted names, without speeds that are in doubt."""
    out: dict[str, float] = {}
    left_out = SPEEDS if value.get("doubts") else ()
    for key, item in value.items():
        if key in left_out:
            continue
        if isinstance(item, dict):
            out |= flat(item, f"{prefix}{key}.")
        elif isinstance(item, numbers.Real) and not isinstance(item, bool):
            out[prefix + key] = float(item)
    return out
