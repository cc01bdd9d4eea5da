"""The matched table: heads that learned from the same conversations with the same arithmetic,
scored on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.scripts.fitting.verdict import ratio, rows_of
from outrider.scripts.reports.table import Table, change, interval

Report = dict[str, Any]
SHAPES = ("chain", "tree")
SHOWN = 4  # tokens of a chain whose acceptance is told
REQUESTED = ("prompts", "num_prompts", "max_new_tokens", "batch_size", "dtype")
UNTIMED = "No times: the machine did other work."
REFERENCE = "eagle3"  # the head that the others are compared with, paired by prompt
SEED = "-seed"  # between a recipe's name and the seed of a head that is not from the first one


def matched(
    trained: Report,
    drafters: Mapping[str, str],
    reports: Mapping[str, Report],
    timed: bool = True,
) -> Report:
    """What scripts/lab/train_heads.py knows of its heads joined with how they scored. trained:
    heads.json; drafters: by head, the folder that was scored; reports: by temperature, the
    report of scripts/evaluate.py with every folder as a chain and as a tree; timed: whether
    anybody vouches for what they say of time. If not, `speedup` and `draft_ms` are None and
    "note" says why.

    {"data_sha256", "asked": {temperature: what was asked}, "heads": {name: {steps, flops,
    tokens, cpu_seconds, "scores": {temperature: {shape: {accepted_length, against, speedup,
    draft_ms, conditional}}}}}}; `against` is the ratio of accepted length to that of the
    reference from the same seed in the same shape, `conditional` the acceptance by position
    given that the one before was accepted. With heads from several seeds also "seeds"
    (`over_seeds`)."""
    heads: dict[str, Any] = {}
    for name, folder in drafters.items():
        known = trained["heads"][name]
        learned: dict[str, Any] = {}
        scores: dict[str, Any] = {}
        for temperature, report in reports.items():
            rows = rows_of(report)
            scores[temperature] = {}
            for shape in SHAPES:
                row = rows.get(f"{folder}@{shape}")
                if row is None:  # skipped, and the report says why
                    continue
                learned = row["training"] or learned
                first = rows.get(f"{drafters.get(_reference(name), '')}@{shape}")
                scores[temperature][shape] = {
                    "accepted_length": row["accepted_length"],
                    "against": ratio(row, first) if first else None,
                    "speedup": row["speedup"] if timed else None,
                    "draft_ms": row["draft_ms"] if timed else None,
                    "conditional": [p["conditional"] for p in row["acceptance_by_position"]],
                }
        heads[name] = {
            **known,
            "tokens": learned.get("tokens_seen"),
            "cpu_seconds": learned.get("cpu_seconds"),
            "scores": scores,
        }
    requested = {
        temperature: {key: report["settings"][key] for key in REQUESTED}
        for temperature, report in reports.items()
    }
    found = {"data_sha256": trained["data_sha256"], "asked": requested, "heads": heads}
    if not timed:
        found["note"] = UNTIMED
    seeds = over_seeds(drafters, reports)
    return {**found, "seeds": seeds} if seeds else found


def _reference(name: str) -> str:
    """The reference from the same seed as a head."""
    _, seed, number = name.partition(SEED)
    return REFERENCE + seed + number


def over_seeds(drafters: Mapping[str, str], reports: Mapping[str, Report]) -> Report:
    """What the seed of training does to every recipe that was trained from several.

    {recipe: {temperature: {shape: {lengths, against}}}}: the accepted length of every seed, and
    the ratio to the reference with the cycles of all seeds counted together, resampled by
    prompt. {} where there is one seed."""
    recipes: dict[str, list[str]] = {}
    for name in drafters:
        recipes.setdefault(name.partition(SEED)[0], []).append(name)
    found: Report = {}
    for temperature, report in reports.items():
        rows = rows_of(report)
        for shape in SHAPES:
            scored = {
                recipe: [rows[f"{drafters[name]}@{shape}"] for name in names]
                for recipe, names in recipes.items()
                if len(names) > 1 and all(f"{drafters[name]}@{shape}" in rows for name in names)
            }
            pooled = {recipe: _pooled(seeds) for recipe, seeds in scored.items()}
            for recipe, seeds in scored.items():
                against = ratio(pooled[recipe], pooled[REFERENCE]) if REFERENCE in pooled else None
                found.setdefault(recipe, {}).setdefault(temperature, {})[shape] = {
                    "lengths": [row["accepted_length"]["mean"] for row in seeds],
                    "against": against,
                }
    return found


def _pooled(seeds: Sequence[Report]) -> Report:
    """One row in place of several: every prompt with the cycles of all of them."""
    prompts: dict[str, Report] = {}
    for row in seeds:
        for prompt in row["per_prompt"]:
            one = prompts.setdefault(prompt["prompt_id"], {**prompt, "cycles": 0, "tokens": 0.0})
            one["cycles"] += prompt["cycles"]
            one["tokens"] += (prompt["accepted_length"] or 0.0) * prompt["cycles"]
    for one in prompts.values():
        one["accepted_length"] = one["tokens"] / one["cycles"] if one["cycles"] else None
    return {"per_prompt": list(prompts.values())}


def tables(found: Report) -> list[Table]:
    """What the heads cost, a table of scores for every temperature, and what the seed did."""
    temperatures = next(iter(found["heads"].values()))["scores"]
    parts = [costs(found), *(scores(found, each) for each in temperatures)]
    return [*parts, seeds(found)] if "seeds" in found else parts


def seeds(found: Report) -> Table:
    """A row for every recipe that was trained from several seeds: the smallest and the largest
    accepted length of a seed, and the paired ratio of all seeds together."""
    requested = sorted(
        {
            (temperature, shape)
            for scores in found["seeds"].values()
            for temperature, shapes in scores.items()
            for shape in shapes
        }
    )
    columns = ["all seeds together"]
    for temperature, shape in requested:
        columns += [f"{shape}, T = {temperature}", f"to {REFERENCE}"]
    rows = []
    for recipe, scores in found["seeds"].items():
        cells = [recipe]
        for temperature, shape in requested:
            score = scores.get(temperature, {}).get(shape)
            if score is None:
                cells += ["–", "–"]
                continue
            lengths = score["lengths"]
            mean = sum(lengths) / len(lengths)
            cells.append(f"{mean:.3f} ({min(lengths):.3f} to {max(lengths):.3f})")
            cells.append(change(score["against"]) if recipe != REFERENCE else "")
        rows.append(cells)
    return Table(columns, rows)


def costs(found: Report) -> Table:
    """What every head learned from, and how often each of its first tokens is accepted where
    the one before was: of its chain, at the first temperature."""
    places = [f"token {k}" for k in range(1, SHOWN + 1)]
    columns = ["head", "steps", "10¹² FLOPs", "million tokens", "core minutes", *places]
    rows = []
    for name, head in found["heads"].items():
        chain = next(iter(head["scores"].values())).get("chain")
        known = [c for c in chain["conditional"] if c is not None][:SHOWN] if chain else []
        cells = [
            name,
            f"{head['steps']:,}",
            f"{head['flops'] / 1e12:.0f}",
            _scaled(head["tokens"], 1e6, 2),
            _scaled(head["cpu_seconds"], 60, 0),
            *(f"{chance:.0%}" for chance in known),
            *["–"] * (SHOWN - len(known)),
        ]
        rows.append(cells)
    return Table(columns, rows)


def scores(found: Report, temperature: str) -> Table:
    """A row for every head: accepted length with its interval, the paired ratio to the
    reference, milliseconds of drafting a cycle and speedup, as a chain and as a tree."""
    columns = [f"T = {temperature}"]
    shapes = [
        shape
        for shape in SHAPES
        if any(shape in head["scores"][temperature] for head in found["heads"].values())
    ]
    for shape in shapes:
        columns += [shape, f"to {REFERENCE}", "draft ms", "speedup"]
    rows = []
    for name, head in found["heads"].items():
        cells = [name]
        for shape in shapes:
            score = head["scores"][temperature].get(shape)
            if score is None:
                cells += ["–"] * 4
                continue
            cells += [
                interval(score["accepted_length"]),
                change(score["against"]) if name.partition(SEED)[0] != REFERENCE else "",
                _scaled(score["draft_ms"], 1, 1),
                interval(score["speedup"], 2, "×"),
            ]
        rows.append(cells)
    return Table(columns, rows)


def title(found: Report) -> str:
    """At which budget, what was asked, and what somebody noted beside it ("note")."""
    budget = max(head["flops"] for head in found["heads"].values())
    requested = "; ".join(
        f"T = {temperature}: {each['num_prompts']} prompts × {each['max_new_tokens']} tokens, "
        f"batch {each['batch_size']}, {each['dtype']}"
        for temperature, each in found["asked"].items()
    )
    message = f"{budget / 1e12:.0f} × 10¹² floating point operations of the draft each; {requested}"
    return f"{message}. {found['note']}" if found.get("note") else message


def _scaled(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"
