"""The figures of a report, drawn from report.json alone: nothing is recomputed here.

Each panel is a function (axes, report) so that the same drawing serves the page (inline SVG)
and figures/*.png.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from outrider.scripts.common.names import clipped

THEMED = {
    "#1d2433": "ink",
    "#667085": "muted",
    "#e6e8ee": "line",
    "#98a1b3": "faint",
    "#b9bfcc": "faint",
}
FEW = 5  # a share of fewer trials is not drawn
CROWD = 4  # more drafters than these get one line each
WIDE = 6.6  # inches of a panel
INK, MUTED, GRID = "#1d2433", "#667085", "#e6e8ee"
COLORS = ("#3767d6", "#e2762b", "#1f9d73", "#8b56c9", "#d43f5e", "#0f93a8", "#a8832a", "#c45aa5")
EVEN: Any = {"color": MUTED, "linewidth": 1, "linestyle": (0, (3, 3))}  # the line at no gain
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
}


def color_of(report: dict[str, Any]) -> dict[str, str]:
    """Drafter name -> colour: the palette in order, grey for rows that draft nothing."""
    palette = {d["name"]: COLORS[i % len(COLORS)] for i, d in enumerate(drafting(report))}
    return {d["name"]: palette.get(d["name"], "#98a1b3") for d in report["drafters"]}


def drafting(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that draft, transformers' own among them not."""
    return [d for d in report["drafters"] if d["shape"] != "none"]


def named(ax: Axes, labels: Sequence[str]) -> None:
    """One row of bars or dots per label, each with room for its own."""
    ax.set_yticks(range(len(labels)), [clipped(label) for label in labels])
    ax.set_ylim(-0.5, len(labels) - 0.5 if labels else 0.5)
    ax.grid(axis="y", visible=False)


def _bars(ax: Axes, report: dict[str, Any], key: str, title: str, unit: str, label: str) -> None:
    rows = [d for d in report["drafters"] if d.get(key) and d[key]["mean"] is not None][::-1]
    colors = color_of(report)
    doubted = [d for d in rows if key == "speedup" and d["doubts"]]
    far = max([d[key]["high"] or d[key]["mean"] for d in rows if d not in doubted], default=1.0)
    for y, d in enumerate(rows):
        value, low, high = d[key]["mean"], d[key]["low"], d[key]["high"]
        if d in doubted:
            ax.text(far * 1.03, y, "in doubt", va="center", color=INK)
            continue
        ax.barh(y, value, height=0.62, color=colors[d["name"]], alpha=0.92)
        if low is not None and high > low:
            ax.plot([low, high], [y, y], color=INK, linewidth=1.6, solid_capstyle="butt")
        ax.text(far * 1.03, y, f"{value:.2f}{unit}", va="center", color=INK, fontweight="bold")
    ax.axvline(1.0, **EVEN)
    named(ax, [d["label"] for d in rows])
    ax.set_xlim(0, far * 1.2)
    ax.set_title(title)
    ax.set_xlabel(label)


def speedup(ax: Axes, report: dict[str, Any]) -> None:
    label = "times `none`, decoding alone"
    _bars(ax, report, "speedup", "Speed against plain decoding", "×", label)


def accepted_length(ax: Axes, report: dict[str, Any]) -> None:
    label = "tokens per target pass, bonus token included"
    _bars(ax, report, "accepted_length", "Mean accepted length", "", label)


def by_position(ax: Axes, report: dict[str, Any]) -> None:
    colors, deepest, drawn = color_of(report), 1, drafting(report)
    both = len(drawn) <= CROWD
    for d in drawn:
        points = [p for p in d["acceptance_by_position"] if p["trials"] >= FEW]
        if not points:
            continue
        color = colors[d["name"]]
        deepest = max(deepest, *(p["position"] for p in points))
        at = [p["position"] for p in points]
        given, of_all = ([p[key] for p in points] for key in ("conditional", "unconditional"))
        ax.plot(at, given, "o-", color=color, label=d["label"], ms=5)
        if both:
            ax.plot(at, of_all, "--", color=color, alpha=0.55)
    ax.set_ylim(0, 1.02)
    ax.set_xticks(range(1, deepest + 1))
    ax.set_title("Acceptance by position")
    ax.set_xlabel(
        "depth in the draft (solid: given the parent was accepted; dashed: of all cycles)"
        if both
        else "depth in the draft (given that the parent was accepted)"
    )
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    legend(ax)


def by_category(ax: Axes, report: dict[str, Any]) -> None:
    colors, drawn = color_of(report), drafting(report)
    names = sorted({c for d in drawn for c in d["by_category"]}, reverse=True)
    step = 0.76 / max(len(drawn), 1)
    for i, d in enumerate(drawn):
        for y, name in enumerate(names):
            cell = d["by_category"].get(name, {}).get("accepted_length")
            if not cell or cell["mean"] is None:
                continue
            at, color = y + 0.38 - step * (i + 0.5), colors[d["name"]]
            if cell["low"] is not None:
                ax.plot([cell["low"], cell["high"]], [at, at], color=color, alpha=0.45, lw=3)
            label = None if y else d["label"]
            ax.plot(cell["mean"], at, "o", color=color, ms=5.5, label=label)
    for y in range(1, len(names)):
        ax.axhline(y - 0.5, color=MUTED, linewidth=0.4, alpha=0.4)
    ax.axvline(1.0, **EVEN)
    named(ax, names)
    ax.set_title("Accepted length by category")
    ax.set_xlabel("tokens per target pass, bonus token included")
    legend(ax)


def legend(ax: Axes) -> None:
    """Below the panel, in as many columns as the longest label leaves room for."""
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    labels = [clipped(label) for label in labels]
    columns = min(3, len(labels), int((WIDE - 0.4) / (0.42 + 0.068 * max(map(len, labels)))))
    ax.figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=max(columns, 1),
        handlelength=1.4,
        columnspacing=1.2,
        borderaxespad=0.3,
    )


# name -> (drawing, what it shows in words)
PANELS: dict[str, tuple[Callable[[Axes, dict[str, Any]], None], str]] = {
    "speedup": (speedup, "Speed of every drafter against plain decoding, with intervals."),
    "accepted_length": (accepted_length, "Accepted length of every drafter, with intervals."),
    "acceptance_by_position": (by_position, "Acceptance by depth, a line per drafter."),
    "accepted_length_by_category": (
        by_category,
        "Accepted length by category with intervals, a dot per drafter.",
    ),
}


def height(name: str, report: dict[str, Any]) -> float:
    """Inches that a panel takes: as much as it has rows."""
    if name == "accepted_length_by_category":
        drawn = max(len(drafting(report)), 1)
        categories = len({c for d in report["drafters"] for c in d["by_category"]})
        return 1.6 + max(0.3, 0.1 * drawn) * max(categories, 2)
    return 1.7 + 0.36 * max(5, len(report["drafters"]))


def panel(name: str, report: dict[str, Any]) -> Figure:
    """One panel as a figure of its own."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(WIDE, height(name, report)), layout="constrained")
        PANELS[name][0](made.subplots(), report)
        return made


def png(figure: Figure, dpi: int = 130) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: Figure, salt: str) -> str:
    """Inline SVG with ids of its own (several stand on one page) and without a date."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
        )
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{salt}-", text)
    # The page's own colours, so that figures follow a dark theme.
    for color, name in THEMED.items():
        text = text.replace(color, f"var(--{name})")
    return re.sub(r' (?:width|height)="[^"]*pt"', "", text, count=2)  # the page sets the width
