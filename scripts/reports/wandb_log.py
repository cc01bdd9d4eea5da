"""A report's figures and headline numbers to Weights & Biases, only when asked for. Offline
runs work as wandb has them (WANDB_MODE=offline)."""

from __future__ import annotations

import numbers
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError, first_line
from outrider.train.trackers import no_reports


def to_wandb(report: dict[str, Any], out: Path, job: str) -> None:
    """Log every scalar of the report's rows, and the PNGs under OUT/figures.

    Raises UserError where wandb is missing, not logged in, or cannot reach its server.
    """
    no_reports(None)
    try:
        import wandb
    except ImportError:
        raise UserError(
            "wandb: the library is not installed; pip install wandb, or set wandb=false"
        ) from None
    rows = report.get("drafters") or report.get("rows") or []
    try:
        with wandb.init(project="outrider", job_type=job, config=report["settings"]) as run:
            for row in rows:
                run.summary.update({f"{row['name']}/{k}": v for k, v in flat(row).items()})
            run.log({p.stem: wandb.Image(str(p)) for p in sorted((out / "figures").glob("*.png"))})
    except (wandb.Error, OSError) as error:
        raise UserError(
            f"wandb: {first_line(error)}; the report is in {out}; set wandb=false or "
            "WANDB_MODE=offline"
        ) from error


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of nested mappings under dotted names."""
    out: dict[str, float] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            out |= flat(item, f"{prefix}{key}.")
        elif isinstance(item, numbers.Real) and not isinstance(item, bool):
            out[prefix + key] = float(item)
    return out
