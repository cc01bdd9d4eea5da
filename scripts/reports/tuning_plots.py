"""Figures that a report has only where there is something to draw: what tuning measured, how
the heads learned. Drawn from the report alone, like scripts/reports/plots.py; each panel says
whether it has anything to show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from outrider.scripts.reports import plots
from outrider.scripts.reports.plots import COLORS, EVEN, color_of, curve, legend

Report = dict[str, Any]
LINES = (("chain", "K", "depth", "-"), ("tree", "n nodes", "nodes", "--"))


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


def against_k(ax: Axes, report: Report) -> None:
    """Predicted speedup against levels and nodes, with what was measured on top."""
    for i, (label, t) in enumerate(report["tuning"].items()):
        color = COLORS[i % len(COLORS)]
        for kind, size, key, style in LINES:
            points = t["curves"].get(kind) or []
            if points:
                message = f"{label}, {kind} of {size}"
                curve(ax, points, (key, "speedup"), style, color=color, lw=1.8, label=message)
        for row in t.get("rows", []):
            at = row["settings"].get("nodes") or row["settings"].get("depth")
            found = row["measured"]["speedup"]
            if not at or found["mean"] is None:
                continue
            if found["low"] is not None:
                ax.plot([at, at], [found["low"], found["high"]], color=color, alpha=0.35, lw=2.4)
            mark = "o" if row["kind"] == "chain" else "D"
            ax.plot(at, found["mean"], mark, color=color, ms=5.5, mec="white", mew=0.8)
    _times(ax)
    ax.set_title("Speedup against K and tree size")
    ax.set_xlabel("draft tokens verified per cycle (lines: predicted, points: measured)")
    legend(ax, 2)


def against_batch(ax: Axes, report: Report) -> None:
    """Speedup against batch size: predicted, and measured where several were run."""
    keys = ("batch_size", "speedup")
    for i, (label, t) in enumerate(report.get("tuning", {}).items()):
        points = t["curves"].get("batch") or []
        if points:
            how = {"color": COLORS[i % len(COLORS)], "label": f"{label}, predicted"}
            curve(ax, points, keys, "o--", ms=4.5, **how)
    own = {d["label"]: color_of(report)[d["name"]] for d in report.get("drafters", ())}
    for i, (label, points) in enumerate(report.get("batches", {}).items()):
        color = own.get(label, COLORS[i % len(COLORS)])
        _banded(ax, points, keys, color=color, label=f"{label}, measured", lw=1.8)
    _times(ax)
    ax.set_title("Speedup against batch size")
    ax.set_xlabel("rows decoded together")
    legend(ax, 2)


def latency(ax: Axes, report: Report) -> None:
    """What a target pass costs over the nodes it verifies."""
    _, t = next(iter(report["tuning"].items()))
    for i, (batch, knots) in enumerate(t["latency"]["target"].items()):
        color = COLORS[i % len(COLORS)]
        fitted = [(nodes + 1, ms) for nodes, ms in knots]
        curve(ax, fitted, (0, 1), "-", color=color, lw=1.8, label=f"batch {batch}")
        own = (s for s in t.get("samples", []) if str(s["batch_size"]) == batch)
        seen = [(s["nodes"] + 1, s["target"]) for s in own]
        curve(ax, seen, (0, 1), "o", color=color, ms=2.6, alpha=0.35, mew=0)
    _doubling(ax)
    ax.set_ylim(bottom=0)
    ax.set_title("Latency of a target pass")
    ax.set_xlabel("tokens per row: the last one and the draft")
    ax.set_ylabel("milliseconds")
    legend(ax, 4)


def breakdown(ax: Axes, report: Report) -> None:
    """Milliseconds per token by part, plain decoding beside the choice."""
    plots.stacked(ax, list(report["breakdown"].items()))


Needs = Callable[[Report], bool]
Panels = dict[str, tuple[Needs, Callable[[Axes, Report], None], str]]
BY_BATCH = (
    lambda r: bool(r.get("tuning") or r.get("batches")),
    against_batch,
    "Speedup against the number of rows decoded together.",
)
EVALUATE: Panels = {
    "speedup_against_batch": BY_BATCH,
    "learning": (
        lambda r: bool(r.get("learning")),
        learning,
        "Accepted length on held-out prompts against training steps.",
    ),
}
TUNE: Panels = {
    "speedup_against_k": (
        lambda r: True,
        against_k,
        "Lines of predicted speedup against the size of the draft, with measured points.",
    ),
    "latency": (
        lambda r: True,
        latency,
        "Milliseconds of a target pass against tokens per row, a line per batch size.",
    ),
    "speedup_against_batch": BY_BATCH,
    "breakdown": (
        lambda r: True,
        breakdown,
        "Bars of milliseconds per token by part, plain decoding and the choice.",
    ),
}


def present(panels: Panels, report: Report) -> dict[str, tuple[Any, str]]:
    """The panels with something to show: name -> (drawing, what it shows in words)."""
    return {name: (draw, words) for name, (needs, draw, words) in panels.items() if needs(report)}
