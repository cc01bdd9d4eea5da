"""A report to wandb, only when asked for: a table of scores, the figures, and the speeds and
accepted lengths under the names speed/ and eval/. `wandb=` means what it means to a training run
(train/log.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from outrider.conf.errors import first_line
from outrider.train.log import no_reports

COLUMNS = ("T", "drafter", "accepted length", "speedup", "tokens/s", "in doubt")


def to_wandb(report: dict[str, Any], out: Path, mode: str, project: str) -> None:
    """Log a report and the PNGs under OUT/figures.

    mode: "online" or "offline". Trouble with wandb (not installed, no account, no network)
    costs a line on stderr and no more: the report is written by then.
    """
    no_reports(mode)
    try:
        import wandb

        about: dict[str, Any] = {"project": project, "mode": mode, "dir": str(out)}
        with wandb.init(job_type="evaluate", config=report["settings"], **about) as run:
            pictures = sorted((out / "figures").glob("*.png"))
            logged = {f"figures/{path.stem}": wandb.Image(str(path)) for path in pictures}
            rows = [
                (one["settings"]["temperature"], *_scores(row))
                for one in (report, *report["others"])
                for row in one["drafters"]
            ]
            table = wandb.Table(columns=[*COLUMNS], data=[[*row] for row in rows])
            run.log({**logged, "eval/drafters": table})
            for temperature, label, length, speedup, rate, doubted in rows:
                name = f"{label}/T={temperature:g}"
                run.summary[f"eval/{name}/accepted_length"] = length
                if not doubted:
                    run.summary[f"speed/{name}/speedup"] = speedup
                    run.summary[f"speed/{name}/tokens_per_second"] = rate
    except Exception as error:  # as in train.log.Trackers
        print(f"wandb: not used ({first_line(error)}); the report is in {out}", file=sys.stderr)


def _scores(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of COLUMNS behind the temperature."""
    length, speedup = row["accepted_length"]["mean"], row["speedup"]["mean"]
    return row["label"], length, speedup, row["tokens_per_second"], bool(row["doubts"])
