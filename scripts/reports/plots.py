"""The figures of a report, drawn from report.json alone: nothing is recomputed here."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.scripts.common.names import clipped

FEW = 5  # a share of fewer trials is not drawn
WIDE = 6.6  # inches of a panel
INK, MUTED, GRID, FAINT = "#1d2433", "#667085", "#e6e8ee", "#98a1b3"
COLORS = ("#3767d6", "#e2762b", "#1f9d73", "#8b56c9", "#d43f5e", "#0f93a8", "#a8832a", "#c45aa5")
EVEN: Any = {"color": MUTED, "linewidth": 1, "linestyle": (0, (3, 3))}  # the line at no gain
STYLE: Any = {
    "axes.edgecolor": GRID,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "legend.fontsize": 9,
}


def color_of(report: dict[str, Any]) -> dict[str, str]:
    """Drafter name -> colour: the palette in order, grey for rows that draft nothing."""
    palette = {d["name"]: COLORS[i % len(COLORS)] for i, d in enumerate(drafting(report))}
    return {d["name"]: palette.get(d["name"], FAINT) for d in report["drafters"]}


def drafting(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that draft, transformers' own among them not."""
    return [d for d in report["drafters"] if d["shape"] != "none"]


def bars(ax: Axes, report: dict[str, Any], key: str, unit: str) -> None:
    """A bar for every row, with its interval; none for a speed in doubt."""
    rows = [d for d in report["drafters"] if d.get(key) and d[key]["mean"] is not None][::-1]
    colors = color_of(report)
    sound = [key != "speedup" or not d["doubts"] for d in rows]
    ends = [d[key]["high"] or d[key]["mean"] for d, fine in zip(rows, sound, strict=True) if fine]
    far = max(ends, default=1.0)
    for y, (d, fine) in enumerate(zip(rows, sound, strict=True)):
        value, low, high = (d[key][name] for name in ("mean", "low", "high"))
        if fine:
            ax.barh(y, value, height=0.62, color=colors[d["name"]])
            ax.plot([low or value, high or value], [y, y], color=INK, linewidth=1.6)
        ax.text(far * 1.03, y, f"{value:.2f}{unit}" if fine else "in doubt", va="center")
    ax.axvline(1.0, **EVEN)
    _named(ax, [d["label"] for d in rows])
    ax.set_xlim(0, far * 1.2)


def by_position(ax: Axes, report: dict[str, Any]) -> None:
    """A line for every row that drafts."""
    colors = color_of(report)
    for d in drafting(report):
        points = [p for p in d["acceptance_by_position"] if p["trials"] >= FEW]
        at, share = ([p[key] for p in points] for key in ("position", "conditional"))
        if points:
            ax.plot(at, share, "o-", color=colors[d["name"]], label=clipped(d["label"]), ms=5)
    ax.set_ylim(0, 1.02)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    _legend(ax)


def by_category(ax: Axes, report: dict[str, Any]) -> None:
    """A dot with its interval for every row that drafts, in every category."""
    colors, drawn, names = color_of(report), drafting(report), categories(report)[::-1]
    for i, d in enumerate(drawn):
        color, label = colors[d["name"]], clipped(d["label"])
        for y, name in enumerate(names):
            cell = d["by_category"][name]["accepted_length"]
            if cell["mean"] is None:
                continue
            at, ends = y + 0.38 - 0.76 * (i + 0.5) / len(drawn), (cell["low"], cell["high"])
            ax.plot([x or cell["mean"] for x in ends], [at, at], color=color, alpha=0.45, lw=3)
            ax.plot(cell["mean"], at, "o", color=color, ms=5.5, label=label)
            label = ""
    ax.axvline(1.0, **EVEN)
    _named(ax, names)
    _legend(ax)


def categories(report: dict[str, Any]) -> list[str]:
    return sorted({c for d in drafting(report) for c in d["by_category"]})


def _named(ax: Axes, labels: Sequence[str]) -> None:
    """One row of bars or dots per label, each with room for its own."""
    ax.set_yticks(range(len(labels)), [clipped(label) for label in labels])
    ax.set_ylim(-0.5, max(len(labels) - 0.5, 0.5))
    ax.grid(axis="y", visible=False)


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    columns = 2 if max(map(len, labels), default=0) < 25 else 1
    if handles:
        ax.figure.legend(handles, labels, loc="outside lower left", ncols=columns)


TOKENS = "tokens per target pass, bonus token included"
# name -> (drawing, title, axis)
PANELS: dict[str, tuple[Callable[[Axes, dict[str, Any]], None], str, str]] = {
    "speedup": (
        functools.partial(bars, key="speedup", unit="×"),
        "Speed against plain decoding",
        "times `none`, decoding alone",
    ),
    "accepted_length": (
        functools.partial(bars, key="accepted_length", unit=""),
        "Mean accepted length",
        TOKENS,
    ),
    "acceptance_by_position": (
        by_position,
        "Acceptance by position",
        "depth in the draft (given that the parent was accepted)",
    ),
    "accepted_length_by_category": (by_category, "Accepted length by category", TOKENS),
}


def drawn(report: dict[str, Any]) -> dict[str, bytes]:
    """Return every panel as a PNG of its own, as tall as it has rows."""
    found = {}
    for name, (draw, title, axis) in PANELS.items():
        tall = 1.7 + 0.36 * max(5, len(report["drafters"]))
        if draw is by_category:
            each = max(0.3, 0.1 * len(drafting(report)))
            tall = 1.6 + each * max(len(categories(report)), 2)
        with matplotlib.style.context(["seaborn-v0_8-whitegrid", STYLE]):
            made, buffer = Figure(figsize=(WIDE, tall), layout="constrained"), io.BytesIO()
            ax = made.subplots()
            draw(ax, report)
            ax.set_title(title)
            ax.set_xlabel(axis)
            made.savefig(buffer, format="png", dpi=130)
            found[name] = buffer.getvalue()
    return found
