"""Figures that a report has only where there is something to draw: speed by batch size, how the
heads learned. Drawn from the report alone, like scripts/reports/plots.py; each panel says
whether it has anything to show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from outrider.scripts.reports.plots import COLORS, EVEN, color_of, curve, legend

Report = dict[str, Any]


def _banded(
    ax: Axes, points: list[dict[str, Any]], keys: tuple[str, str], color: str, **how: Any
) -> None:
    """A line through `points`, and a band of their intervals where all have one."""
    curve(ax, points, keys, "o-", color=color, ms=4.5, **how)
    if all(p.get("low") is not None for p in points):
        x, low, high = ([p[key] for p in points] for key in (keys[0], "low", "high"))
        ax.fill_between(x, low, high, color=color, alpha=0.13, lw=0)


def _doubling(ax: Axes) -> None:
    """Along x a step is twice as much."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")


def _times(ax: Axes) -> None:
    """Speedups over what doubles."""
    ax.axhline(1.0, **EVEN)
    _doubling(ax)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.2f}×")


def learning(ax: Axes, report: Report) -> None:
    """Decoded accepted length on held-out prompts while the heads were trained."""
    for i, (label, points) in enumerate(report["learning"].items()):
        color = COLORS[i % len(COLORS)]
        _banded(ax, points, ("step", "accepted_length"), color=color, label=label)
    ax.set_title("Learning curves")
    ax.set_xlabel("training step")
    ax.set_ylabel("accepted length, held out")
    legend(ax)


def against_batch(ax: Axes, report: Report) -> None:
    """Speedup against batch size, where several were run."""
    keys = ("batch_size", "speedup")
    own = {d["label"]: color_of(report)[d["name"]] for d in report.get("drafters", ())}
    for i, (label, points) in enumerate(report.get("batches", {}).items()):
        color = own.get(label, COLORS[i % len(COLORS)])
        _banded(ax, points, keys, color=color, label=label, lw=1.8)
    _times(ax)
    ax.set_title("Speedup against batch size")
    ax.set_xlabel("rows decoded together")
    legend(ax, 2)


Needs = Callable[[Report], bool]
Panels = dict[str, tuple[Needs, Callable[[Axes, Report], None], str]]
EVALUATE: Panels = {
    "speedup_against_batch": (
        lambda r: bool(r.get("batches")),
        against_batch,
        "Speedup against the number of rows decoded together.",
    ),
    "learning": (
        lambda r: bool(r.get("learning")),
        learning,
        "Accepted length on held-out prompts against training steps.",
    ),
}


def present(panels: Panels, report: Report) -> dict[str, tuple[Any, str]]:
    """The panels with something to show: name -> (drawing, what it shows in words)."""
    return {name: (draw, words) for name, (needs, draw, words) in panels.items() if needs(report)}
