"""The figures of a report, drawn from report.json alone: nothing is recomputed here.

Each panel is a function (axes, report) so that the same drawing serves the page (inline SVG) and figure.png.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

THEMED = {"#1d2433": "ink", "#667085": "muted", "#e6e8ee": "line", "#98a1b3": "faint", "#b9bfcc": "faint"}
FEW = 5  # a share of fewer trials is not drawn
INK, MUTED, GRID = "#1d2433", "#667085", "#e6e8ee"
COLORS = ("#3767d6", "#e2762b", "#1f9d73", "#8b56c9", "#d43f5e", "#0f93a8", "#a8832a", "#c45aa5")
PHASES = {
    "draft": ("drafter", "#8b56c9"),
    "target": ("target forward", "#3767d6"),
    "verify": ("law and verification", "#1f9d73"),
    "commit": ("cache commit", "#e2762b"),
    "other": ("Python and the rest", "#b9bfcc"),
}
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
    """Drafter name -> colour: grey for rows that draft nothing, the palette in order for the others."""
    drafting = [d["name"] for d in report["drafters"] if d["shape"] != "none"]
    palette = {name: COLORS[i % len(COLORS)] for i, name in enumerate(drafting)}
    return {d["name"]: palette.get(d["name"], "#98a1b3") for d in report["drafters"]}


def _bars(ax: Axes, report: dict[str, Any], key: str, title: str, unit: str, label: str) -> None:
    rows = [d for d in report["drafters"] if d.get(key) and d[key]["mean"] is not None][::-1]
    colors = color_of(report)
    far = max([d[key]["high"] or d[key]["mean"] for d in rows], default=1.0)
    for y, d in enumerate(rows):
        value, low, high = d[key]["mean"], d[key]["low"], d[key]["high"]
        ax.barh(y, value, height=0.62, color=colors[d["name"]], alpha=0.92)
        if low is not None and high > low:
            ax.plot([low, high], [y, y], color=INK, linewidth=1.6, solid_capstyle="butt")
        ax.text(far * 1.03, y, f"{value:.2f}{unit}", va="center", color=INK, fontweight="bold")
    ax.axvline(1.0, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.set_yticks(range(len(rows)), [d["label"] for d in rows])
    ax.set_xlim(0, far * 1.2)
    ax.grid(axis="y", visible=False)
    ax.set_title(title)
    ax.set_xlabel(label)


def speedup(ax: Axes, report: dict[str, Any]) -> None:
    _bars(ax, report, "speedup", "Speed against plain decoding", "×", "times `none`, decoding alone")


def accepted_length(ax: Axes, report: dict[str, Any]) -> None:
    _bars(ax, report, "accepted_length", "Tokens per target pass", "", "accepted length, bonus token included")


def by_position(ax: Axes, report: dict[str, Any]) -> None:
    colors, deepest = color_of(report), 1
    for d in report["drafters"]:
        points = [p for p in d["acceptance_by_position"] if p["trials"] >= FEW]
        if not points:
            continue
        x = [p["position"] for p in points]
        deepest = max(deepest, *x)
        ax.plot(x, [p["conditional"] for p in points], "o-", color=colors[d["name"]], label=d["label"], ms=5)
        ax.plot(x, [p["unconditional"] for p in points], "--", color=colors[d["name"]], alpha=0.55)
    ax.set_ylim(0, 1.02)
    ax.set_xticks(range(1, deepest + 1))
    ax.set_title("Acceptance by position")
    ax.set_xlabel("depth in the draft (solid: given the parent was accepted; dashed: of all cycles)")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    _legend(ax)


def by_category(ax: Axes, report: dict[str, Any]) -> None:
    colors = color_of(report)
    drawn = [d for d in report["drafters"] if d["shape"] != "none"]
    names = sorted({c for d in drawn for c in d["by_category"]}, reverse=True)
    step = 0.7 / max(len(drawn), 1)
    for i, d in enumerate(drawn):
        for y, name in enumerate(names):
            cell = d["by_category"].get(name, {}).get("accepted_length")
            if not cell or cell["mean"] is None:
                continue
            at = y + 0.35 - step * (i + 0.5)
            if cell["low"] is not None:
                ax.plot([cell["low"], cell["high"]], [at, at], color=colors[d["name"]], alpha=0.45, lw=3)
            ax.plot(cell["mean"], at, "o", color=colors[d["name"]], ms=6, label=None if y else d["label"])
    ax.axvline(1.0, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.set_yticks(range(len(names)), names)
    ax.set_title("Accepted length by category")
    ax.set_xlabel("tokens per target pass")
    _legend(ax)


def by_prompt(ax: Axes, report: dict[str, Any]) -> None:
    import numpy as np

    colors = color_of(report)
    drawn = {(d["name"], d["label"]): [p["accepted_length"] for p in d["per_prompt"] if p["accepted_length"]]
             for d in report["drafters"] if d["shape"] != "none"}  # fmt: skip
    values = [v for vs in drawn.values() for v in vs]
    if values:
        edges = np.linspace(1.0, max(values) + 1e-9, 19).tolist()
        for (name, label), vs in drawn.items():
            ax.hist(vs, bins=edges, histtype="stepfilled", color=colors[name], alpha=0.22)
            ax.hist(vs, bins=edges, histtype="step", color=colors[name], linewidth=1.6, label=label)
    ax.set_title("Accepted length per prompt")
    ax.set_xlabel("tokens per target pass")
    ax.set_ylabel("prompts")
    _legend(ax)


def time_per_token(ax: Axes, report: dict[str, Any]) -> None:
    rows = [d for d in report["drafters"] if d.get("ms_per_token")][::-1]
    seen: set[str] = set()
    for y, d in enumerate(rows):
        left = 0.0
        for phase, (label, color) in PHASES.items():
            width = d["ms_per_token"].get(phase, 0.0)
            ax.barh(y, width, left=left, height=0.62, color=color, label=None if label in seen else label)
            seen.add(label)
            left += width
        ax.text(left * 1.01, y, f" {left:.1f}", va="center", color=INK)
    ax.set_yticks(range(len(rows)), [d["label"] for d in rows])
    ax.grid(axis="y", visible=False)
    ax.set_title("Where the time goes")
    ax.set_xlabel("milliseconds per token while decoding")
    ax.margins(x=0.12)
    _legend(ax)


def _legend(ax: Axes, columns: int = 3) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.2), ncols=columns, handlelength=1.4,
                  columnspacing=1.2, borderaxespad=0)  # fmt: skip


PANELS: dict[str, Callable[[Axes, dict[str, Any]], None]] = {
    "speedup": speedup,
    "accepted_length": accepted_length,
    "acceptance_by_position": by_position,
    "accepted_length_by_category": by_category,
    "accepted_length_per_prompt": by_prompt,
    "time_per_token": time_per_token,
}


def panel(name: str, report: dict[str, Any]) -> Figure:
    """One panel as a figure of its own."""
    tall = 4.6 if name == "accepted_length_by_category" else 1.5 + 0.42 * max(4, len(report["drafters"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.6, tall), layout="constrained")
        PANELS[name](figure.subplots(), report)
        return figure


def figure(draw: Callable[[Axes, dict[str, Any]], None], report: dict[str, Any], tall: float = 3.6) -> Figure:
    """Any drawing as a figure of its own."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(6.6, tall), layout="constrained")
        draw(made.subplots(), report)
        return made


def overview(report: dict[str, Any], title: str) -> bytes:
    """All panels on one sheet, as PNG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 15), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.25, h_pad=0.25)  # type: ignore[union-attr,call-arg]
        figure.suptitle(title, x=0.02, ha="left", fontsize=14, fontweight="bold", color=INK)
        for ax, draw in zip(figure.subplots(3, 2).flat, PANELS.values(), strict=True):
            draw(ax, report)
        return png(figure)


def png(figure: Figure, dpi: int = 130) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: Figure, salt: str) -> str:
    """Inline SVG whose ids are its own (several stand on one page) and whose bytes hold no date."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{salt}-", text)
    for color, name in THEMED.items():  # the page's own colours, so that figures follow a dark theme
        text = text.replace(color, f"var(--{name})")
    return re.sub(r' (?:width|height)="[^"]*pt"', "", text, count=2)  # the page sets the width
