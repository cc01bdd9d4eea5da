"""Figures that a report has only where there is something to draw: prompts by category, what tuning measured, how the
heads learned. Drawn from the report alone, like scripts/lib/plots.py; each panel says whether it has anything to show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from scripts.lib.plots import COLORS, INK, MUTED, PHASES, _legend, color_of

Report = dict[str, Any]


def prompts_by_category(ax: Axes, report: Report) -> None:
    """One dot per prompt, stacked where they coincide: a histogram for every category."""
    colors = color_of(report)
    drawn = [d for d in report["drafters"] if d["shape"] != "none"]
    names = sorted({p["category"] for d in drawn for p in d["per_prompt"]}, reverse=True)
    for y, name in enumerate(names):
        for i, d in enumerate(drawn):
            values = [p["accepted_length"] for p in d["per_prompt"] if p["category"] == name and p["accepted_length"]]
            taken: dict[float, int] = {}
            for value in sorted(values):
                at = round(value * 20) / 20
                taken[at] = taken.get(at, 0) + 1
                ax.plot(at, y - 0.32 + 0.64 * (i + 0.5) / len(drawn) + 0.05 * (taken[at] - 1), "o", ms=4.5,
                        color=colors[d["name"]], alpha=0.75, mew=0,
                        label=d["label"] if y == 0 and value == min(values) else None)  # fmt: skip
    for y in range(1, len(names)):
        ax.axhline(y - 0.5, color=MUTED, linewidth=0.4, alpha=0.4)
    ax.set_yticks(range(len(names)), names)
    ax.grid(axis="y", visible=False)
    ax.set_title("Accepted length of every prompt, by category")
    ax.set_xlabel("tokens per target pass (one dot per prompt)")
    _legend(ax)


def learning(ax: Axes, report: Report) -> None:
    """Decoded accepted length on held-out prompts while the heads were trained."""
    for i, (label, points) in enumerate(report["learning"].items()):
        color = COLORS[i % len(COLORS)]
        x = [p["step"] for p in points]
        ax.plot(x, [p["accepted_length"] for p in points], "o-", color=color, label=label, ms=4.5)
        if all(p.get("low") is not None for p in points):
            ax.fill_between(x, [p["low"] for p in points], [p["high"] for p in points], color=color, alpha=0.13, lw=0)
    ax.set_title("Learning curves")
    ax.set_xlabel("training step")
    ax.set_ylabel("accepted length, held out")
    _legend(ax)


def _line(ax: Axes, points: list[dict[str, Any]], x: str, y: str, color: str, label: str) -> None:
    ax.plot([p[x] for p in points], [p[y] for p in points], "o-", color=color, label=label, ms=3.8, linewidth=1.8)


def against_k(ax: Axes, report: Report) -> None:
    """Predicted speedup against levels and nodes, with what was measured on top."""
    for i, (label, t) in enumerate(report["tuning"].items()):
        color = COLORS[i % len(COLORS)]
        for kind, key, style in (("chain", "depth", "-"), ("tree", "nodes", "--")):
            points = t["curves"].get(kind) or []
            if points:
                ax.plot([p[key] for p in points], [p["speedup"] for p in points], style, color=color, linewidth=1.8,
                        label=f"{label}, {'chain of K' if kind == 'chain' else 'tree of n nodes'}")  # fmt: skip
        for row in t.get("rows", []):
            at = row["settings"].get("nodes") or row["settings"].get("depth")
            found = row["measured"]["speedup"]
            if not at or found["mean"] is None:
                continue
            if found["low"] is not None:
                ax.plot([at, at], [found["low"], found["high"]], color=color, alpha=0.35, linewidth=2.4)
            mark = "o" if row["kind"] == "chain" else "D"
            ax.plot(at, found["mean"], mark, color=color, ms=5.5, mec="white", mew=0.8)
    ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.2f}×")
    ax.set_title("Speedup against K and tree size")
    ax.set_xlabel("draft tokens verified per cycle (lines: predicted, points: measured)")
    _legend(ax, 2)


def against_batch(ax: Axes, report: Report) -> None:
    """Speedup against batch size: predicted for tuned settings, and measured where several were run."""
    for i, (label, t) in enumerate(report.get("tuning", {}).items()):
        points = t["curves"].get("batch") or []
        if points:
            ax.plot([p["batch_size"] for p in points], [p["speedup"] for p in points], "o--", ms=4.5,
                    color=COLORS[i % len(COLORS)], label=f"{label}, predicted")  # fmt: skip
    for i, (label, points) in enumerate(report.get("batches", {}).items()):
        _line(ax, points, "batch_size", "speedup", COLORS[i % len(COLORS)], f"{label}, measured")
    ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.2f}×")
    ax.set_title("Speedup against batch size")
    ax.set_xlabel("rows decoded together")
    _legend(ax, 2)


def latency(ax: Axes, report: Report) -> None:
    """What a target pass costs over the nodes it verifies."""
    _, t = next(iter(report["tuning"].items()))
    for i, (batch, knots) in enumerate(t["latency"]["target"].items()):
        color = COLORS[i % len(COLORS)]
        ax.plot([n + 1 for n, _ in knots], [ms for _, ms in knots], "-", color=color, lw=1.8, label=f"batch {batch}")
        seen = [(s["nodes"] + 1, s["target"]) for s in t.get("samples", []) if str(s["batch_size"]) == batch]
        ax.plot([n for n, _ in seen], [ms for _, ms in seen], "o", color=color, ms=2.6, alpha=0.35, mew=0)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_ylim(bottom=0)
    ax.set_title("Latency of a target pass")
    ax.set_xlabel("tokens per row: the last one and the draft")
    ax.set_ylabel("milliseconds")
    _legend(ax, 4)


def predicted(ax: Axes, report: Report) -> None:
    """Predicted against measured tokens/s, with the band of 10 %."""
    pairs = []
    for i, (label, t) in enumerate(report["tuning"].items()):
        rows = [r for r in t.get("rows", []) if r["measured"]["tokens_per_second"]]
        points = [(r["measured"]["tokens_per_second"], r["predicted_at_pace"]) for r in rows]
        pairs += points
        ax.plot([m for m, _ in points], [p for _, p in points], "o", ms=6, mew=0, alpha=0.8, label=label,
                color=COLORS[i % len(COLORS)])  # fmt: skip
    if pairs:
        low, high = min(map(min, pairs)) * 0.9, max(map(max, pairs)) * 1.1
        ax.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=MUTED, alpha=0.12, lw=0,
                        label="within 10 %")  # fmt: skip
        ax.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
    ax.set_title("Predicted against measured")
    ax.set_xlabel("measured tokens/s")
    ax.set_ylabel("predicted tokens/s")
    _legend(ax)


def break_even(ax: Axes, report: Report) -> None:
    """The accepted length a setting needs, and the one it has."""
    for i, (label, t) in enumerate(report["tuning"].items()):
        color = COLORS[i % len(COLORS)]
        for kind, key in (("chain", "depth"), ("tree", "nodes")):
            points = t["curves"].get(kind) or []
            if points:
                name = f"{label}, {kind}"
                ax.plot([p[key] for p in points], [p["accepted_length"] for p in points], "-", color=color, label=name,
                        alpha=1.0 if kind == "chain" else 0.6)  # fmt: skip
                ax.plot([p[key] for p in points], [p["break_even"] for p in points], ":", color=color, linewidth=1.8,
                        alpha=1.0 if kind == "chain" else 0.6)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_title("Accepted length, and what would break even")
    ax.set_xlabel("draft tokens verified per cycle (dotted: break-even)")
    ax.set_ylabel("tokens per target pass")
    _legend(ax, 2)


def breakdown(ax: Axes, report: Report) -> None:
    """Milliseconds per token by part, plain decoding beside the choice."""
    seen: set[str] = set()
    items = list(report["breakdown"].items())[::-1]
    for y, (_, parts) in enumerate(items):
        left = 0.0
        for phase, (label, color) in PHASES.items():
            width = parts.get(phase, 0.0)
            ax.barh(y, width, left=left, height=0.58, color=color, label=None if label in seen else label)
            seen.add(label)
            left += width
        ax.text(left * 1.01, y, f" {left:.1f}", va="center", color=INK)
    ax.set_yticks(range(len(items)), [name for name, _ in items])
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    ax.set_title("Where the time goes")
    ax.set_xlabel("milliseconds per token while decoding")
    _legend(ax)


def ranks(ax: Axes, report: Report) -> None:
    """Share of positions where the right token had each rank, level by level."""
    table = report["acceptance"].get("by_level_and_rank") or []
    for level, shares in enumerate(table):
        bottom = 0.0
        for rank, share in enumerate(shares[:8]):
            ax.bar(level + 1, share, bottom=bottom, width=0.62, color=COLORS[rank % len(COLORS)],
                   label=f"rank {rank + 1}" if level == 0 else None)  # fmt: skip
            bottom += share
    ax.set_xticks(range(1, len(table) + 1))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    ax.set_title("The right token's rank, by position in the draft")
    ax.set_xlabel("depth in the draft (share of all positions whose path is right so far)")
    _legend(ax, 4)


Needs = Callable[[Report], bool]
EVALUATE: dict[str, tuple[Needs, Callable[[Axes, Report], None], str]] = {
    "prompts_by_category": (lambda r: any(d["shape"] != "none" for d in r["drafters"]), prompts_by_category,
                            "Dots, one per prompt, grouped by category, over the accepted length of that prompt."),
    "speedup_against_k": (lambda r: bool(r.get("tuning")), against_k,
                          "Lines of predicted speedup against the size of the draft, with measured points."),
    "speedup_against_batch": (lambda r: bool(r.get("tuning") or r.get("batches")), against_batch,
                              "Speedup against the number of rows decoded together."),
    "latency": (lambda r: bool(r.get("tuning")), latency,
                "Milliseconds of a target pass against tokens per row, a line per batch size."),
    "predicted": (lambda r: bool(r.get("tuning")) and any(t.get("rows") for t in r["tuning"].values()), predicted,
                  "Predicted against measured tokens per second, with the diagonal and a band of ten percent."),
    "learning": (lambda r: bool(r.get("learning")), learning,
                 "Accepted length on held-out prompts against training steps."),
}  # fmt: skip
TUNE: dict[str, tuple[Needs, Callable[[Axes, Report], None], str]] = {
    "speedup_against_k": EVALUATE["speedup_against_k"],
    "predicted": EVALUATE["predicted"],
    "latency": EVALUATE["latency"],
    "break_even": (lambda r: True, break_even,
                   "Accepted length against the size of the draft, dotted: the length that would break even."),
    "speedup_against_batch": EVALUATE["speedup_against_batch"],
    "breakdown": (lambda r: True, breakdown, "Bars of milliseconds per token by part, plain decoding and the choice."),
    "acceptance_by_rank": (lambda r: bool(r["acceptance"].get("by_level_and_rank")), ranks,
                           "Stacked bars: how often the right token had each rank, by depth in the draft."),
}  # fmt: skip


def present(panels: dict[str, tuple[Needs, Any, str]], report: Report) -> dict[str, tuple[Any, str]]:
    """The panels with something to show: name -> (drawing, what it shows in words)."""
    return {name: (draw, words) for name, (needs, draw, words) in panels.items() if needs(report)}
