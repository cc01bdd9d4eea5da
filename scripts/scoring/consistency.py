"""Do two runs of the scoreboard agree, and does a ranking survive ten prompts more or fewer?
From report.json alone.

agreement   of every row that both reports have: the 95 % intervals of accepted length,
            tokens/s and speedup overlap.
ranking     a report claims "a is faster than b" where the interval of their paired speed ratio
            lies on one side of 1 and a stayed faster in every one of DRAWS random choices of
            ten prompts fewer (`claims`). Here other prompts are left out, or drawn a second
            time, at random; a claim is stable when a stays faster than b in every draw. How
            often the interval alone would still have been above 1 is told beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError

METRICS = {
    "accepted_length": "accepted length",
    "tokens_per_second_interval": "tokens/s",
    "speedup": "speedup",
}
SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "dtype",
    "batch_size",
    "num_prompts",
    "seed",
    "verify",
)
RESAMPLES = 400
FEWER, DRAWS = (
    10,
    20_000,
)  # prompts that a claim must be able to do without, and how often that is tried


def read(place: str) -> dict[str, Any]:
    """The report of a folder or of a report.json.

    Raises UserError when it cannot be read, is no score report, or holds no outcomes by
    prompt."""
    path = Path(place).expanduser()
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); give a folder that evaluate.py wrote"
        ) from None
    try:
        for row in report["drafters"]:
            for unit in row["units"]:
                float(unit["tokens"]), float(unit["seconds"]), len(unit["prompts"])
            for metric in METRICS:
                cells = row[metric]
                [None if cells[k] is None else float(cells[k]) for k in ("mean", "low", "high")]
        for pair in report["pairs"]:
            (pair["a"], pair["b"], pair["speed_ratio"]["low"], pair["speed_ratio"]["high"])
        report["settings"]["prompts"]["sha256"], report["target"]["name"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: holds no outcomes by prompt; score again with this version of evaluate.py"
        ) from None
    return report  # type: ignore[no-any-return]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Settings under which two reports are of different things."""
    found = [
        f"{k}: {a['settings'].get(k)} against {b['settings'].get(k)}"
        for k in SAME
        if a["settings"].get(k) != b["settings"].get(k)
    ]
    if a["settings"]["prompts"]["sha256"] != b["settings"]["prompts"]["sha256"]:
        found.append("prompts: different files")
    if a["target"].get("weights_sha256") != b["target"].get("weights_sha256"):
        found.append(f"target: {a['target']['name']} against {b['target']['name']}, other weights")
    return found


def agreement(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """{rows: [{name, label, metrics: {metric: {a, b, change, overlap}}, agrees}], only_in_one,
    agrees}. A metric without an interval agrees where the means are the same, and is left open
    (None) elsewhere."""
    mine, theirs = ({row["name"]: row for row in r["drafters"]} for r in (a, b))
    rows = []
    for name in (n for n in mine if n in theirs):
        metrics = {m: _compared(mine[name][m], theirs[name][m]) for m in METRICS}
        verdicts = [cell["overlap"] for cell in metrics.values()]
        rows.append(
            {
                "name": name,
                "label": mine[name]["label"],
                "metrics": metrics,
                "agrees": False if False in verdicts else None if None in verdicts else True,
            }
        )
    return {
        "rows": rows,
        "only_in_one": sorted(mine.keys() ^ theirs.keys()),
        "agrees": bool(rows) and all(row["agrees"] is not False for row in rows),
    }


def _compared(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    known = all(x[k] is not None for x in (a, b) for k in ("low", "high"))
    overlap = (
        (a["low"] <= b["high"] and b["low"] <= a["high"])
        if known
        else True
        if a["mean"] == b["mean"]
        else None
    )
    change = b["mean"] / a["mean"] - 1 if a["mean"] and b["mean"] is not None else None
    return {"a": a, "b": b, "change": change, "overlap": overlap}


def claims(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(faster, slower) of every pair that the report's ranking parts: by its interval, and
    whichever FEWER prompts are left out. Reports of earlier versions hold no outcomes by
    prompt: there the interval decides."""
    found = []
    ranked = {row["name"] for row in report["drafters"] if row["kind"] != "reference"}
    for pair in report["pairs"]:
        low, high = pair["speed_ratio"]["low"], pair["speed_ratio"]["high"]
        if low is None or not {pair["a"], pair["b"]} <= ranked:
            continue
        if low > 1:
            found.append((pair["a"], pair["b"]))
        elif high < 1:
            found.append((pair["b"], pair["a"]))
    if not found or any("units" not in row for row in report["drafters"]):
        return found
    names, units, tokens, seconds = _table(report)
    generator, place = np.random.default_rng(0), {n: i for i, n in enumerate(names)}
    left = max(len(units) - -(-FEWER // max(map(len, units))), 2)
    kept = generator.permuted(np.tile(np.arange(len(units)) < left, (DRAWS, 1)), axis=1).astype(
        float
    )
    speed = (kept @ tokens.T) / np.maximum(kept @ seconds.T, 1e-12)  # [DRAWS, rows]
    return [(a, b) for a, b in found if bool((speed[:, place[a]] > speed[:, place[b]]).all())]


def _table(
    report: dict[str, Any],
) -> tuple[list[str], list[tuple[str, ...]], np.ndarray, np.ndarray]:
    """(row names, timed units, tokens, seconds), the last two [rows, units]."""
    rows = {row["name"]: row for row in report["drafters"]}
    units = [tuple(unit["prompts"]) for unit in next(iter(rows.values()))["units"]]
    table = {n: {tuple(u["prompts"]): u for u in row["units"]} for n, row in rows.items()}
    if any(known.keys() != set(units) for known in table.values()):
        raise UserError("report.json: its rows ran on different prompts; score again")
    names = list(rows)
    tokens, seconds = (
        np.array([[float(table[n][u][k]) for u in units] for n in names])
        for k in ("tokens", "seconds")
    )
    return names, units, tokens, seconds


def stability(report: dict[str, Any], change: int, draws: int, seed: int) -> dict[str, Any]:
    """What becomes of the claims with `change` prompts fewer, and with `change` of them drawn
    a second time.

    {claims: [{faster, slower, fewer: {kept, claimed}, more: {...}, stable}], stable, prompts}:
    kept, claimed: shares of `draws` in which the one is still faster, and is so with an
    interval above 1. Prompts that ran together leave and come together. Raises UserError when
    fewer than two units would be left."""
    names, units, tokens, seconds = _table(report)
    chunk = max(map(len, units), default=1)
    count = -(-change // chunk)
    if len(units) - count < 2:
        raise UserError(
            f"change: {change} of {sum(map(len, units))} prompts leave too few; set a "
            "smaller number"
        )
    generator = np.random.default_rng(seed)
    place = {n: i for i, n in enumerate(names)}
    parted = [(place[a], place[b]) for a, b in claims(report)]
    kept = {kind: np.zeros((2, len(parted))) for kind in ("fewer", "more")}
    for _ in range(draws):
        order = generator.permutation(len(units))
        again = generator.integers(0, len(units), count)
        for kind, chosen in (("fewer", order[count:]), ("more", np.concatenate([order, again]))):
            weights = np.stack(
                [
                    np.bincount(chosen, minlength=len(units)),
                    *_resampled(chosen, len(units), generator),
                ]
            ).astype(float)
            with np.errstate(divide="ignore", invalid="ignore"):
                speed = (weights @ tokens.T) / (weights @ seconds.T)  # [1 + resamples, rows]
                for i, (fast, slow) in enumerate(parted):
                    ratio = speed[:, fast] / speed[:, slow]
                    kept[kind][0, i] += ratio[0] > 1
                    kept[kind][1, i] += np.nanpercentile(ratio[1:], 2.5) > 1
    told = []
    for i, (fast, slow) in enumerate(parted):
        shares = {
            k: {"kept": float(v[0, i] / draws), "claimed": float(v[1, i] / draws)}
            for k, v in kept.items()
        }
        told.append(
            {
                "faster": names[fast],
                "slower": names[slow],
                **shares,
                "stable": all(s["kept"] == 1.0 for s in shares.values()),
            }
        )
    return {
        "claims": told,
        "prompts": sum(map(len, units)),
        "change": count * chunk,
        "draws": draws,
        "stable": all(row["stable"] for row in told),
    }


def _resampled(chosen: np.ndarray, units: int, generator: np.random.Generator) -> np.ndarray:
    """[RESAMPLES, units] counts of a bootstrap over the chosen units."""
    picks = chosen[generator.integers(0, len(chosen), (RESAMPLES, len(chosen)))]
    counts = np.zeros((RESAMPLES, units), int)
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], picks), 1)
    return counts
