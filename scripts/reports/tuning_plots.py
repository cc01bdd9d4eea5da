"""Figures that a report has only where there is something to draw: prompts by category, what
tuning measured, how the heads learned. Drawn from the report alone, like
scripts/reports/plots.py; each panel says whether it has anything to show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from scripts.reports import plots
from scripts.reports.plots import COLORS, INK, MUTED, color_of, drafting, legend, named

Report = dict[str, Any]


def prompts_by_category(ax: Axes, report: Report) -> None:
    """One dot per prompt, stacked where they coincide: a histogram for every category."""
    colors, drawn = color_of(report), drafting(report)
    names = sorted({p["category"] for d in drawn for p in d["per_prompt"]}, reverse=True)
    told: set[str] = set()
    for y, name in enumerate(names):
        for i, d in enumerate(drawn):
            values = [
                p["accepted_length"]
                for p in d["per_prompt"]
                if p["category"] == name and p["accepted_length"]
            ]
            taken: dict[float, int] = {}
            for value in sorted(values):
                at = round(value * 20) / 20
                taken[at] = taken.get(at, 0) + 1
                ax.plot(
                    at,
                    y + 0.38 - 0.76 * (i + 0.5) / len(drawn) + 0.04 * (taken[at] - 1),
                    "o",
                    ms=4.5,
                    color=colors[d["name"]],
                    alpha=0.75,
                    mew=0,
                    label=None if d["name"] in told else d["label"],
                )
                told.add(d["name"])
    for y in range(1, len(names)):
        ax.axhline(y - 0.5, color=MUTED, linewidth=0.4, alpha=0.4)
    named(ax, names)
    ax.set_title("Accepted length of every prompt, by category")
    ax.set_xlabel("tokens per target pass (one dot per prompt)")
    legend(ax)


def learning(ax: Axes, report: Report) -> None:
    """Decoded accepted length on held-out prompts while the heads were trained."""
    for i, (label, points) in enumerate(report["learning"].items()):
        color = COLORS[i % len(COLORS)]
        x = [p["step"] for p in points]
        ax.plot(x, [p["accepted_length"] for p in points], "o-", color=color, label=label, ms=4.5)
        if all(p.get("low") is not None for p in points):
            ax.fill_between(
                x,
                [p["low"] for p in points],
                [p["high"] for p in points],
                color=color,
                alpha=0.13,
                lw=0,
            )
    ax.set_title("Learning curves")
    ax.set_xlabel("training step")
    ax.set_ylabel("accepted length, held out")
    legend(ax)


def against_k(ax: Axes, report: Report) -> None:
    """Predicted speedup against levels and nodes, with what was measured on top."""
    for i, (label, t) in enumerate(report["tuning"].items()):
        color = COLORS[i % len(COLORS)]
        for kind, key, style in (("chain", "depth", "-"), ("tree", "nodes", "--")):
            points = t["curves"].get(kind) or []
            if points:
                ax.plot(
                    [p[key] for p in points],
                    [p["speedup"] for p in points],
                    style,
                    color=color,
                    linewidth=1.8,
                    label=f"{label}, {'chain of K' if kind == 'chain' else 'tree of n nodes'}",
                )
        for row in t.get("rows", []):
            at = row["settings"].get("nodes") or row["settings"].get("depth")
            found = row["measured"]["speedup"]
            if not at or found["mean"] is None:
                continue
            if found["low"] is not None:
                ax.plot(
                    [at, at], [found["low"], found["high"]], color=color, alpha=0.35, linewidth=2.4
                )
            mark = "o" if row["kind"] == "chain" else "D"
            ax.plot(at, found["mean"], mark, color=color, ms=5.5, mec="white", mew=0.8)
    ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.2f}×")
    ax.set_title("Speedup against K and tree size")
    ax.set_xlabel("draft tokens verified per cycle (lines: predicted, points: measured)")
    legend(ax, 2)


def against_batch(ax: Axes, report: Report) -> None:
    """Speedup against batch size: predicted for tuned settings, and measured where several
    were run.
    """
    for i, (label, t) in enumerate(report.get("tuning", {}).items()):
        points = t["curves"].get("batch") or []
        if points:
            ax.plot(
                [p["batch_size"] for p in points],
                [p["speedup"] for p in points],
                "o--",
                ms=4.5,
                color=COLORS[i % len(COLORS)],
                label=f"{label}, predicted",
            )
    own = {d["label"]: color_of(report)[d["name"]] for d in report.get("drafters", ())}
    for i, (label, points) in enumerate(report.get("batches", {}).items()):
        x, color = [p["batch_size"] for p in points], own.get(label, COLORS[i % len(COLORS)])
        ax.plot(
            x,
            [p["speedup"] for p in points],
            "o-",
            color=color,
            label=f"{label}, measured",
            ms=4.5,
            linewidth=1.8,
        )
        if all(p.get("low") is not None for p in points):
            ax.fill_between(
                x,
                [p["low"] for p in points],
                [p["high"] for p in points],
                color=color,
                alpha=0.13,
                lw=0,
            )
    ax.axhline(1.0, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.2f}×")
    ax.set_title("Speedup against batch size")
    ax.set_xlabel("rows decoded together")
    legend(ax, 2)


def latency(ax: Axes, report: Report) -> None:
    """What a target pass costs over the nodes it verifies."""
    _, t = next(iter(report["tuning"].items()))
    for i, (batch, knots) in enumerate(t["latency"]["target"].items()):
        color = COLORS[i % len(COLORS)]
        ax.plot(
            [n + 1 for n, _ in knots],
            [ms for _, ms in knots],
            "-",
            color=color,
            lw=1.8,
            label=f"batch {batch}",
        )
        seen = [
            (s["nodes"] + 1, s["target"])
            for s in t.get("samples", [])
            if str(s["batch_size"]) == batch
        ]
        ax.plot(
            [n for n, _ in seen],
            [ms for _, ms in seen],
            "o",
            color=color,
            ms=2.6,
            alpha=0.35,
            mew=0,
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_ylim(bottom=0)
    ax.set_title("Latency of a target pass")
    ax.set_xlabel("tokens per row: the last one and the draft")
    ax.set_ylabel("milliseconds")
    legend(ax, 4)


def predicted(ax: Axes, report: Report) -> None:
    """Predicted against measured tokens/s, with the band of 10 %."""
    pairs = []
    for i, (label, t) in enumerate(report["tuning"].items()):
        rows = [r for r in t.get("rows", []) if r["measured"]["tokens_per_second"]]
        points = [(r["measured"]["tokens_per_second"], r["predicted_at_pace"]) for r in rows]
        pairs += points
        ax.plot(
            [m for m, _ in points],
            [p for _, p in points],
            "o",
            ms=6,
            mew=0,
            alpha=0.8,
            label=label,
            color=COLORS[i % len(COLORS)],
        )
    if pairs:
        low, high = min(map(min, pairs)) * 0.9, max(map(max, pairs)) * 1.1
        ax.fill_between(
            [low, high],
            [0.9 * low, 0.9 * high],
            [1.1 * low, 1.1 * high],
            color=MUTED,
            alpha=0.12,
            lw=0,
            label="within 10 %",
        )
        ax.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
    ax.set_title("Predicted against measured")
    ax.set_xlabel("measured tokens/s")
    ax.set_ylabel("predicted tokens/s")
    legend(ax)


def break_even(ax: Axes, report: Report) -> None:
    """The accepted length a setting needs, and the one it has."""
    for i, (label, t) in enumerate(report["tuning"].items()):
        color = COLORS[i % len(COLORS)]
        for kind, key in (("chain", "depth"), ("tree", "nodes")):
            points = t["curves"].get(kind) or []
            if points:
                name = f"{label}, {kind}"
                ax.plot(
                    [p[key] for p in points],
                    [p["accepted_length"] for p in points],
                    "-",
                    color=color,
                    label=name,
                    alpha=1.0 if kind == "chain" else 0.6,
                )
                ax.plot(
                    [p[key] for p in points],
                    [p["break_even"] for p in points],
                    ":",
                    color=color,
                    linewidth=1.8,
                    alpha=1.0 if kind == "chain" else 0.6,
                )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_title("Accepted length, and what would break even")
    ax.set_xlabel("draft tokens verified per cycle (dotted: break-even)")
    ax.set_ylabel("tokens per target pass")
    legend(ax, 2)


def breakdown(ax: Axes, report: Report) -> None:
    """Milliseconds per token by part, plain decoding beside the choice."""
    plots.stacked(ax, list(report["breakdown"].items()))


def accepted_ranks(ax: Axes, report: Report) -> None:
    """For every tree and depth, how often which of the siblings was accepted, of all cycles."""
    rows = plots.ranked(report)[::-1]
    seen: set[int] = set()
    for y, (_, _, shares) in enumerate(rows):
        parts = [*shares[:3], sum(shares[3:])]
        left = 0.0
        for rank, share in enumerate(parts):
            told = "4th and later" if rank == 3 else ("1st", "2nd", "3rd")[rank]
            ax.barh(
                y,
                share,
                left=left,
                height=0.7,
                color=COLORS[rank],
                alpha=0.9,
                label=None if rank in seen else told,
            )
            seen.add(rank)
            left += share
        ax.text(left + 0.01, y, f"{left:.0%}", va="center", color=INK, fontsize=9)
    named(
        ax, [f"{d['label']}, depth {depth}" if depth == 1 else f"{depth}" for d, depth, _ in rows]
    )
    ax.set_xlim(0, 1.06)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    ax.set_title("Which candidate of a tree was accepted")
    ax.set_xlabel("share of all cycles, by depth and by place among the siblings")
    legend(ax, 4)


def ranks(ax: Axes, report: Report) -> None:
    """Share of positions where the right token had each rank, level by level."""
    table = report["acceptance"].get("by_level_and_rank") or []
    for level, shares in enumerate(table):
        bottom = 0.0
        for rank, share in enumerate(shares[:8]):
            ax.bar(
                level + 1,
                share,
                bottom=bottom,
                width=0.62,
                color=COLORS[rank % len(COLORS)],
                label=f"rank {rank + 1}" if level == 0 else None,
            )
            bottom += share
    ax.set_xticks(range(1, len(table) + 1))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    ax.set_title("The right token's rank, by position in the draft")
    ax.set_xlabel("depth in the draft (share of all positions whose path is right so far)")
    legend(ax, 4)


Needs = Callable[[Report], bool]
EVALUATE: dict[str, tuple[Needs, Callable[[Axes, Report], None], str]] = {
    "speedup_per_prompt": (
        lambda r: any(p.get("speedup") for d in drafting(r) for p in d["per_prompt"]),
        plots.speedup_by_prompt,
        "Histogram of the speedup of every prompt, a strip per drafter.",
    ),
    "accepted_ranks": (
        lambda r: bool(plots.ranked(r)),
        accepted_ranks,
        "Bars by depth of a tree: how often a candidate was accepted there, by place "
        "among siblings.",
    ),
    "prompts_by_category": (
        lambda r: any(d["shape"] != "none" for d in r["drafters"]),
        prompts_by_category,
        "Dots, one per prompt, grouped by category, over the accepted length of that prompt.",
    ),
    "speedup_against_k": (
        lambda r: bool(r.get("tuning")),
        against_k,
        "Lines of predicted speedup against the size of the draft, with measured points.",
    ),
    "speedup_against_batch": (
        lambda r: bool(r.get("tuning") or r.get("batches")),
        against_batch,
        "Speedup against the number of rows decoded together.",
    ),
    "latency": (
        lambda r: bool(r.get("tuning")),
        latency,
        "Milliseconds of a target pass against tokens per row, a line per batch size.",
    ),
    "predicted": (
        lambda r: bool(r.get("tuning")) and any(t.get("rows") for t in r["tuning"].values()),
        predicted,
        "Predicted against measured tokens per second, with the diagonal and a band of ten percent.",
    ),
    "learning": (
        lambda r: bool(r.get("learning")),
        learning,
        "Accepted length on held-out prompts against training steps.",
    ),
}
TUNE: dict[str, tuple[Needs, Callable[[Axes, Report], None], str]] = {
    "speedup_against_k": EVALUATE["speedup_against_k"],
    "predicted": EVALUATE["predicted"],
    "latency": EVALUATE["latency"],
    "break_even": (
        lambda r: True,
        break_even,
        "Accepted length against the size of the draft, dotted: the length that would break even.",
    ),
    "speedup_against_batch": EVALUATE["speedup_against_batch"],
    "breakdown": (
        lambda r: True,
        breakdown,
        "Bars of milliseconds per token by part, plain decoding and the choice.",
    ),
    "acceptance_by_rank": (
        lambda r: bool(r["acceptance"].get("by_level_and_rank")),
        ranks,
        "Stacked bars: how often the right token had each rank, by depth in the draft.",
    ),
}


def present(
    panels: dict[str, tuple[Needs, Any, str]], report: Report
) -> dict[str, tuple[Any, str]]:
    """The panels with something to show: name -> (drawing, what it shows in words)."""
    return {name: (draw, words) for name, (needs, draw, words) in panels.items() if needs(report)}
