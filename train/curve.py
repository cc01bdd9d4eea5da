"""The learning curve of a run: decoded accepted length against tokens seen and against minutes
of training.

Drawn from metrics.jsonl alone, after every evaluation: OUT/learning_curve.json and
OUT/learning_curve.png. Minutes are those of the updates, without evaluations; both counts go
on over a resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.conf import disk
from outrider.conf.jsonl import records

NAME = "learning_curve"
FIELDS = (
    "accepted_length",
    "low",
    "high",
    "tokens_seen",
    "supervised_seen",
    "train_seconds",
    "cpu_seconds",
)


def points(metrics: Path) -> list[dict[str, Any]]:
    """The evaluations of a run that know what had been spent by then: step and FIELDS, in
    order.
    """
    found: dict[int, dict[str, Any]] = {}
    for entry in records(metrics):
        if entry.get("event") == "eval" and "tokens_seen" in entry:
            found[entry["step"]] = {
                "step": entry["step"],
                "shape": entry.get("shape"),
                **{k: entry.get(k) for k in FIELDS},
            }
    return [found[step] for step in sorted(found)]


def draw(out: Path, main: bool = True) -> None:
    """Write both files of run folder `out`; on ranks other than the main one, and without an
    evaluation, nothing. A curve that cannot be written stops no run."""
    if (
        not main
        or not (out / "metrics.jsonl").exists()
        or not (known := points(out / "metrics.jsonl"))
    ):
        return
    try:
        disk.write_text(out / f"{NAME}.json", json.dumps({"points": known}, indent=1) + "\n")
        disk.write_bytes(out / f"{NAME}.png", _png(known))
    except OSError:
        pass


def _png(known: list[dict[str, Any]]) -> bytes:
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), dpi=150, layout="constrained")
    length = [p["accepted_length"] for p in known]
    banded = all(p["low"] is not None and p["high"] is not None for p in known)
    figure.suptitle(
        "decoded on held-out prompts" + (", with 95 % intervals" if banded else ""), fontsize=10
    )
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (key, per, label) in zip(
        axes,
        (
            ("tokens_seen", 1e6, "million tokens seen"),
            ("train_seconds", 60.0, "minutes of training"),
        ),
        strict=True,
    ):
        x = [p[key] / per for p in known]
        if banded:
            ax.fill_between(
                x, [p["low"] for p in known], [p["high"] for p in known], alpha=0.2, linewidth=0
            )
        ax.plot(x, length, marker="o", markersize=3)
        ax.set_xlim(0, 1.05 * max(x) or 1)
        ax.locator_params(axis="x", nbins=6)
        ax.set_xlabel(label)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel(f"accepted length ({known[-1]['shape']})")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
