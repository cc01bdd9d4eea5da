"""A report's figures and headline numbers to Weights & Biases, only when asked for: `wandb=` means
what it means to a training run (train/trackers.py)."""

from __future__ import annotations

import numbers
import sys
from pathlib import Path
from typing import Any

from outrider.conf.errors import first_line
from outrider.train.trackers import no_reports


def to_wandb(report: dict[str, Any], out: Path, job: str, mode: str, project: str) -> None:
    """Log every scalar of the report's rows, and the PNGs under OUT/figures.

    mode: "online" or "offline". Trouble with wandb (not installed, no account, no network) costs a
    line on stderr and no more: the report is written by then.
    """
    no_reports(mode)
    try:
        import wandb

        _log(wandb, report, out, job, mode, project)
    except Exception as error:  # as in train.trackers.Tracker
        print(f"wandb: not used ({first_line(error)}); the report is in {out}", file=sys.stderr)


def _log(wandb: Any, report: dict[str, Any], out: Path, job: str, mode: str, project: str) -> None:
    rows = report.get("drafters") or report.get("rows") or []
    about = {"job_type": job, "config": report["settings"], "dir": str(out), "mode": mode}
    with wandb.init(project=project, **about) as run:
        for row in rows:
            run.summary.update({f"{row['name']}/{k}": v for k, v in flat(row).items()})
        run.log({p.stem: wandb.Image(str(p)) for p in sorted((out / "figures").glob("*.png"))})


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of nested mappings under dotted names."""
    out: dict[str, float] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            out |= flat(item, f"{prefix}{key}.")
        elif isinstance(item, numbers.Real) and not isinstance(item, bool):
            out[prefix + key] = float(item)
    return out
