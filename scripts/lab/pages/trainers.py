"""The race of the trainers as tables: docs/results/trainer-race.json, which
scripts/lab/trainer_race.py writes."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.decode.stats import ratio_interval
from outrider.scripts.reports.table import Table

OURS = "outrider"
BEFORE = "before"  # a checkout of ours that is compared with this one
RESAMPLES = 2000


def line(row: dict[str, Any]) -> str:
    """What an entry has done, in one line."""
    if row["ended"]:
        return f"{row['entry']}: stopped at step {row['steps']}: {row['ended']}"
    held = row["marks"][-1]["held_out"]["loss_token"] if row["marks"] else []
    losses = " ".join(f"{value:.3f}" for value in held)
    return (
        f"{row['entry']}: {row['steps']} steps, {speed(row):,.0f} tokens per CPU second, "
        f"{row['peak_own_memory_mb']:,} MB, held-out cross-entropy {losses}"
    )


def first_loss(row: dict[str, Any]) -> float:
    """Held-out cross-entropy of the last head at the first step; infinite where it is no
    number."""
    found = float(row["marks"][-1]["held_out"]["loss_token"][0])
    return found if math.isfinite(found) else math.inf


def speed(row: dict[str, Any]) -> float:
    """Tokens per CPU second."""
    tokens, seconds = (sum(turn[i] for turn in row["turns"]) for i in (0, 1))
    return float(tokens / seconds) if seconds else 0.0


def rows_of(groups: Sequence[Sequence[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """What an entry did in every group that it got through."""
    found = [row for rows in groups for row in rows if row["entry"] == name]
    return [row for row in found if row["marks"] and not row["ended"]]


def names(groups: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """The entries, as they stand."""
    return list(dict.fromkeys(row["entry"] for rows in groups for row in rows))


def speed_ratio(
    groups: Sequence[Sequence[dict[str, Any]]], name: str, base: str
) -> tuple[float, float, float]:
    """Tokens per CPU second of `name` over those of `base`: see pace_ratio."""
    return pace_ratio(rows_of(groups, name), rows_of(groups, base))


def pace_ratio(
    rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]
) -> tuple[float, float, float]:
    """Tokens per CPU second of `rows` over those of `base`: mean, and 95 % of resampled turns."""
    found = []
    for some in (rows, base):
        turns = np.array([turn for row in some for turn in row["turns"]], float)
        turns = turns[turns[:, 1] > 0]
        pick = np.random.default_rng(0).integers(0, len(turns), (RESAMPLES, len(turns)))
        sums = np.concatenate([turns.sum(0)[None], turns[pick].sum(1)])
        found.append(sums[:, 0] / sums[:, 1])
    ratio = found[0] / found[1]
    low, high = np.percentile(ratio[1:], [2.5, 97.5])
    return float(ratio[0]), float(low), float(high)


def cycles_of(report: dict[str, Any], group: str, name: str, shape: str) -> np.ndarray:
    """[prompts, 2]: tokens and cycles of a prompt, over all seeds."""
    found = [
        [(sum(cycles), len(cycles)) for cycles in each["cycles"][shape]]
        for each in report["decoded"]
        if each["group"] == group and each["entry"] == name
    ]
    return np.array(found, float).sum(0)


def accepted(report: dict[str, Any], group: str, name: str, shape: str) -> str:
    """Accepted length over all seeds, 95 % over prompts."""
    table = cycles_of(report, group, name, shape)
    found = ratio_interval(table[:, 0].tolist(), table[:, 1].tolist())
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def difference(
    report: dict[str, Any], group: str, pair: tuple[str, str], shape: str
) -> tuple[float, float, float]:
    """Accepted length of the first of a pair minus that of the second; prompts are resampled
    together."""
    first, second = (cycles_of(report, group, name, shape) for name in pair)
    pick = np.random.default_rng(0).integers(0, len(first), (RESAMPLES, len(first)))
    sums = [np.concatenate([t.sum(0)[None], t[pick].sum(1)]) for t in (first, second)]
    apart = sums[0][:, 0] / sums[0][:, 1] - sums[1][:, 0] / sums[1][:, 1]
    low, high = np.percentile(apart[1:], [2.5, 97.5])
    return float(apart[0]), float(low), float(high)


def bracket(found: Sequence[float], digits: int = 3, sign: str = "+") -> str:
    """mean [low, high]."""
    mean, low, high = (f"{value:{sign}.{digits}f}" for value in found)
    return f"{mean} [{low}, {high}]"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean of the seeds and their range."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def held(rows: Sequence[dict[str, Any]], key: str, mark: int = -1) -> str:
    """A figure of the held-out rows at every step of the test, the mean of the seeds."""
    table = [row["marks"][mark]["held_out"][key] for row in rows]
    digits = 1 if key.startswith("top1") else 3
    scale = 100 if key.startswith("top1") else 1
    return " / ".join(f"{scale * statistics.fmean(c):.{digits}f}" for c in zip(*table, strict=True))


def at_tokens(row: dict[str, Any], tokens: float, key: str = "loss_token") -> float:
    """The first step's held-out figure when so many tokens had been read, between marks."""
    marks = row["marks"]
    return float(
        np.interp(tokens, [m["tokens"] for m in marks], [m["held_out"][key][0] for m in marks])
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """Cost, learning, acceptance, the peer's own validation; then single keys; then who stopped."""
    race, found = report["race"], []
    through = [name for name in names(race) if rows_of(race, name)]
    if through:
        found += [speed_table(report, through), learning_table(report, through)]
        found += [acceptance_table(report, through), their_table(report)]
    some = [name for name in names(report["variants"]) if rows_of(report["variants"], name)]
    if some:
        found.append(variants_table(report, some))
    every = [row for rows in (*report["sweep"], *race, *report["variants"]) for row in rows]
    if stopped := [row for row in every if row["ended"] or not row["marks"]]:
        found.append(stopped_table(stopped))
    return found


def text(report: dict[str, Any]) -> str:
    """The tables for a page, and where they come from."""
    parts = []
    for table in tables(report):
        parts += [f"### {table.title}", "", table.markdown(), ""]
    profile = report.get("their_profile") or {}
    peers = rows_of(report["race"], "speculators")
    if "attention" in profile and peers:
        free = statistics.fmean(map(speed, peers)) / (1 - profile["attention"])
        parts += [
            f"Of speculators' step attention takes {100 * profile['attention']:.0f} % of the CPU "
            f"time ({profile['steps']} steps, torch's profiler): without it, as if a GPU's path "
            f"cost nothing, {free:.0f} tokens per CPU second.",
            "",
        ]
    versions = {
        f"{name} {version}"
        for row in report["race"][0]
        for name, version in row.get("versions", {}).items()
    }
    data = report["data"]
    parts.append(
        f"{data['rows']:,} rows of {data['tokens']:,} tokens, {data['held_out']} of them held out; "
        f"{len(report['settings']['seeds'])} seeds (figures with a range: mean, least and most; "
        "brackets: 95 %, turns or prompts resampled); "
        f"{report['settings']['num_prompts']} unseen prompts of "
        f"{report['settings']['answer_tokens']} tokens; {', '.join(sorted(versions))}; "
        f"{report['processor']}; commit {report['commit'][:8]}."
    )
    return "\n".join(parts)


def speed_table(report: dict[str, Any], through: Sequence[str]) -> Table:
    """Programs and what they cost."""
    race, cells = report["race"], []
    for name in through:
        rows = rows_of(race, name)
        alone = name == OURS or OURS not in through
        ratio = "–" if alone else bracket(speed_ratio(race, OURS, name), 2, "")
        cells.append(
            [
                rows[0]["program"],
                f"{rows[0]['trained_parameters']:,}",
                f"{report['best_rates'][name]:g}",
                spread([speed(row) for row in rows], 0),
                ratio,
                spread([row["peak_own_memory_mb"] for row in rows], 0),
                spread([row["peak_memory_mb"] for row in rows], 0),
            ]
        )
    head = ["program", "trained parameters", "learning rate", "tokens per CPU second"]
    return Table(
        [*head, "ours is faster by", "peak memory, MB", "with mapped files"], cells, title="Cost"
    )


def learning_table(report: dict[str, Any], through: Sequence[str]) -> Table:
    """Held-out figures at equal CPU seconds and at equal tokens."""
    race = report["race"]
    least = min(row["marks"][-1]["tokens"] for name in through for row in rows_of(race, name))
    cells = []
    for name in through:
        rows = rows_of(race, name)
        cells.append(
            [
                name,
                spread([row["marks"][-1]["tokens"] for row in rows], 0),
                held(rows, "loss_token"),
                held(rows, "loss_all"),
                held(rows, "top1_token"),
                spread([at_tokens(row, least) for row in rows]),
            ]
        )
    minutes = report["settings"]["minutes"]
    head = ["entry", "tokens read", "cross-entropy by step", "the same over all places"]
    head += ["best token right, %", f"cross-entropy, step 1, at {least:,} tokens"]
    return Table(head, cells, title=f"Held-out rows after {minutes:g} CPU minutes")


def acceptance_table(report: dict[str, Any], through: Sequence[str]) -> Table:
    """Accepted lengths, and what ours has more."""
    cells = []
    for name in through:
        pair = (OURS, name)
        alone = name == OURS or OURS not in through
        more = [
            "–" if alone else bracket(difference(report, "race", pair, shape))
            for shape in ("chain", "tree")
        ]
        lengths = [accepted(report, "race", name, shape) for shape in ("chain", "tree")]
        cells.append([name, lengths[0], more[0], lengths[1], more[1]])
    head = ["entry", "chain of 3", "ours has more by", "tree of 16", "ours has more by"]
    return Table(head, cells, title="Accepted length on unseen prompts, T = 0")


def their_table(report: dict[str, Any]) -> Table:
    """speculators' own validation: its KL, and how often the draft's best token is the target's,
    at each step given that all before it were."""
    cells = []
    for row in report["their_validation"]:
        if "error" in row:
            cells.append([row["error"], "–", "–"])
            continue
        steps = sorted(key for key in row if key.startswith("cond_acc_"))
        losses = sorted(key for key in row if re.fullmatch(r"loss_\d+_epoch", key))
        right = " / ".join(f"{100 * row[key]:.1f}" for key in steps)
        cells.append([row["entry"], " / ".join(f"{row[key]:.3f}" for key in losses), right])
    seed = report["settings"]["seeds"][0]
    head = ["entry", "KL by step, later ones weighed less", "best token is the target's, %"]
    return Table(head, cells, title=f"The same by speculators' own validation, seed {seed}")


def variants_table(report: dict[str, Any], some: Sequence[str]) -> Table:
    """Ours with single keys of others, against ours in the same minutes and at equal tokens."""
    groups = report["variants"]
    least = min(row["marks"][-1]["tokens"] for name in some for row in rows_of(groups, name))
    cells = []
    for name in some:
        rows = rows_of(groups, name)
        pair = (name, OURS)
        alone = name == OURS or OURS not in some
        apart = [
            "–" if alone else bracket(difference(report, "variants", pair, shape))
            for shape in ("chain", "tree")
        ]
        speed = "–" if alone else bracket(speed_ratio(groups, *pair), 2, "")
        changed = "; ".join(rows[0]["changes"]) or "as it is"
        losses = [held(rows, "loss_token"), spread([at_tokens(row, least) for row in rows])]
        cells.append([changed, speed, *losses, *apart])
    head = ["ours with", "tokens per CPU second", "cross-entropy by step"]
    head += [f"step 1, at {least:,} tokens", "accepted length, chain of 3", "tree of 16"]
    minutes = report["settings"]["variant_minutes"]
    seeds = len(report["settings"]["variant_seeds"])
    title = f"Ours with single keys of others, {minutes:g} CPU minutes each, {seeds} seeds"
    return Table(head, cells, title=title)


def stopped_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Who did not get through, where, with what message."""
    cells = [
        [
            row["entry"],
            f"{row['rate']:g}",
            str(row["steps"]),
            row["ended"] or f"saved no head in {row['core_seconds']:.0f} CPU seconds",
        ]
        for row in rows
    ]
    return Table(["entry", "learning rate", "step", "message"], cells, title="Stopped")


def pair_line(head: str, rows: Sequence[dict[str, Any]]) -> str:
    """What two checkouts did with a head, in one line."""
    if stopped := [row for row in rows if row["ended"]]:
        return "; ".join(f"{head}, {row['entry']}: stopped: {row['ended']}" for row in stopped)
    paces = ", ".join(f"{row['entry']} {speed(row):,.0f}" for row in rows)
    return f"{head}: tokens per CPU second: {paces}"


def pair_table(report: dict[str, Any]) -> Table:
    """Every head's training in two checkouts: docs/results/train-pair.json, which
    scripts/lab/train_pair.py writes."""
    cells = []
    for head, rows in report["heads"].items():
        by_name = {row["entry"]: row for row in rows}
        if stopped := [row for row in rows if row["ended"]]:
            words = "; ".join(f"{row['entry']}: {row['ended']}" for row in stopped)
            cells.append([head, words, *5 * ["–"]])
            continue
        before, here = by_name[BEFORE], by_name[OURS]
        memory = [row["peak_own_memory_mb"] for row in (before, here)]
        cells.append(
            [
                head,
                f"{speed(before):,.0f}",
                f"{speed(here):,.0f}",
                bracket(pace_ratio([here], [before]), 2, ""),
                *(f"{value:,}" for value in memory),
                f"{memory[1] / memory[0]:.2f}",
            ]
        )
    head_row = ["head", "before: tokens per CPU second", "now", "ratio"]
    title = f"Ours at {report['commits'][BEFORE]} and at {report['commits'][OURS]}"
    return Table([*head_row, "before: memory, MB", "now", "ratio"], cells, title=title)
