"""What a cycle costs by parts on every target of docs/results/cycle-parts-*.json, and what follows
for a target that was measured with its first layers alone: marked as predicted, with an interval.

The target's pass and its cache grow by the same time with every layer; all else of a cycle, the
drafter too, was measured at the target's own widths. The interval: 90 % of resampled rounds, and
beyond it on both sides the largest miss of the same prediction on targets that were measured
whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.scripts.reports.table import Columns, Table, number

GROWING = ("target", "cache")  # parts that grow with the layers
PARTS = (*GROWING, "drafter", "distribution", "verify", "python")
RESAMPLES = 2000


def read(folder: Path) -> list[dict[str, Any]]:
    """The reports that are there, the smallest target first."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("cycle-parts-*.json"))]
    return sorted(found, key=lambda report: report["depths"][0]["bytes"])


def whole(report: dict[str, Any]) -> bool:
    """Whether all of a target's layers were measured."""
    return bool(report["depths"][0]["layers"] == report["layers"])


def milliseconds(rounds: Sequence[dict[str, Any]], drafted: str, part: str) -> np.ndarray:
    """[rounds] of a part of a cycle."""
    return np.array([each[drafted][part] for each in rounds])


def cycles(depth: dict[str, Any], drafted: str) -> np.ndarray:
    """[rounds] ms of a whole cycle as it was measured."""
    return sum(milliseconds(depth["rounds"], drafted, part) for part in PARTS)  # type: ignore[return-value]


def extended(report: dict[str, Any], drafted: str, layers: int) -> np.ndarray:
    """[rounds] ms of a cycle with `layers` layers, from the two smallest depths."""
    more, less = report["depths"][-2:]
    found = cycles(more, drafted)
    for part in GROWING:
        pair = [milliseconds(depth["rounds"], drafted, part) for depth in (more, less)]
        each = (pair[0] - pair[1]) / (more["layers"] - less["layers"])
        found = found + each * (layers - more["layers"])
    return found


def middle(cycle: np.ndarray, plain: np.ndarray) -> float:
    """A cycle's time in plain tokens."""
    return float(np.median(cycle) / np.median(plain))


def miss(reports: Sequence[dict[str, Any]]) -> float:
    """The largest relative error of a cycle's time in plain tokens, foretold from few layers and
    measured, over all targets that were measured whole. 0 without one."""
    errors = [0.0]
    for report in filter(whole, reports):
        if len(report["depths"]) < 3:
            continue
        full, layers = report["depths"][0], report["layers"]
        for drafted in map(str, report["settings"]["drafted"]):
            foretold = [extended(report, k, layers) for k in (drafted, "0")]
            measured = [cycles(full, k) for k in (drafted, "0")]
            errors.append(abs(middle(*foretold) / middle(*measured) - 1))
    return max(errors)


def price(report: dict[str, Any], drafted: str, error: float) -> dict[str, float]:
    """mean, low, high of a cycle's time in plain tokens: 90 % of resampled rounds, a prediction's
    widened by `error`."""
    if whole(report):
        pair, error = [cycles(report["depths"][0], k) for k in (drafted, "0")], 0.0
    else:
        pair = [extended(report, k, report["layers"]) for k in (drafted, "0")]
    pick = np.random.default_rng(0).integers(0, len(pair[0]), (RESAMPLES, len(pair[0])))
    ratios = np.median(pair[0][pick], -1) / np.median(pair[1][pick], -1)
    low, high = np.percentile(ratios, [5, 95]).tolist()
    return {"mean": middle(*pair), "low": low * (1 - error), "high": high * (1 + error)}


def rows(reports: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for every target and number of drafted tokens; ms are medians of rounds."""
    error = miss(reports)
    for report in reports:
        rounds = report["depths"][0]["rounds"]
        for drafted in map(str, report["settings"]["drafted"]):
            row: dict[str, Any] = {"target": report["target"], "drafted": drafted}
            row["price"] = price(report, drafted, error)
            if whole(report):
                parts = {
                    p: float(np.median(milliseconds(rounds, drafted, p)))
                    for p in (*PARTS, "matrices")
                }
                row["ms"] = parts
                row["cycle"] = float(np.median(cycles(report["depths"][0], drafted)))
            else:
                row["cycle"] = float(np.median(extended(report, drafted, report["layers"])))
            yield row


def best(report: dict[str, Any], reached: Sequence[float], error: float) -> dict[str, Any]:
    """The number of drafted tokens with the largest gain, where a share reached[d] of all drafts
    is accepted down to token d + 1: {drafted, length, gain}."""
    found = []
    for drafted in report["settings"]["drafted"]:
        if drafted and drafted <= len(reached):
            length, cost = 1 + sum(reached[:drafted]), price(report, str(drafted), error)
            gain = {"mean": length / cost["mean"]}
            gain |= {"low": length / cost["high"], "high": length / cost["low"]}
            found.append({"drafted": drafted, "length": length, "gain": gain})
    return max(found, key=lambda one: one["gain"]["mean"])


def _ms(part: str) -> Any:
    return lambda row: number(row["ms"][part], 1) if "ms" in row else "–"


def _bounded(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]"


COLUMNS: Columns = [
    ("target", lambda row: row["target"] + ("" if "ms" in row else " (predicted)")),
    ("drafted", lambda row: row["drafted"]),
    ("matrices alone", _ms("matrices")),
    ("target's pass", _ms("target")),
    ("drafter", _ms("drafter")),
    ("distribution", _ms("distribution")),
    ("verification", _ms("verify")),
    ("cache", _ms("cache")),
    ("Python", _ms("python")),
    ("cycle", lambda row: number(row["cycle"], 1)),
    ("in plain tokens", lambda row: _bounded(row["price"])),
]


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """CPU milliseconds of a cycle by part, on every target."""
    dtypes = sorted({report["settings"].get("dtype", "bfloat16") for report in reports})
    title = (
        f"CPU milliseconds of a cycle by part, one thread, {' or '.join(dtypes)}, a chain of so "
        "many tokens"
    )
    return Table.of(COLUMNS, rows(reports), title=title)


def gains(reports: Sequence[dict[str, Any]], heads: Mapping[str, Sequence[float]]) -> Table:
    """What every target would gain with the acceptance of each of `heads` (name -> shares of the
    drafts that are accepted down to token 1, 2, ..)."""
    error = miss(reports)
    cells = []
    for name, reached in heads.items():
        for report in reports:
            one = best(report, reached, error)
            label = report["target"] + ("" if whole(report) else " (predicted)")
            length = f"{one['length']:.2f}"
            cells.append([name, label, str(one["drafted"]), length, _bounded(one["gain"])])
    head = ["accepted as by", "target", "drafted", "accepted length", "× plain decoding"]
    note = (
        f"predicted: from the time of its first layers at its own widths; on targets that were "
        f"measured whole the same prediction missed by {100 * error:.1f} % at most, which its "
        "interval holds"
    )
    return Table(head, cells, "the same acceptance on every target", [note], words=(0, 1))
