"""The score table and its notes."""

from __future__ import annotations

import functools
from typing import Any

from outrider.scripts.common.names import SERVER
from outrider.scripts.reports.table import DOUBT, Columns, Table, interval, number
from outrider.scripts.scoring.pace import FAR

Row = dict[str, Any]


def positions(row: Row, most: int = 4) -> str:
    """Conditional acceptance at the first depths, as percentages."""
    cells = [
        f"{p['conditional']:.0%}"
        for p in row["acceptance_by_position"][:most]
        if p["conditional"] is not None
    ]
    return " ".join(cells) or "–"


def equality(row: Row) -> str:
    """Answers that equal those of `none` token by token, and the others; see SAME."""
    found = row.get("lossless")
    if not found:
        return "–"
    text = f"{found['equal']}/{found['checked']}"
    text += f" +{found['within_rounding']}≈" if found["within_rounding"] else ""
    return text + (f" !{found['beyond_rounding']}" if found["beyond_rounding"] else "")


def unseen(row: Row) -> bool:
    """Whether a reference drafts where we cannot time it."""
    return row["kind"] == "reference" and not row["draft_ms"]


def speed(row: Row, end_to_end: bool = False) -> str:
    """Of a report's row: its speed in plain decoding's; marked where that is in doubt."""
    text = interval((row["end_to_end"] if end_to_end else row)["speedup"], 2, "×")
    return f"{text} {DOUBT}" if row["doubts"] else text


SAME = (
    "n/m: m answers were compared, one for each turn of a prompt, and n of them are plain "
    "decoding's, token by token; +k≈: k more part where two tokens are equally likely up to "
    "rounding, so either is the model's own; !k: k part beyond rounding"
)
COLUMNS: Columns = [
    ("drafter", lambda r: r["label"]),
    ("accepted length", lambda r: interval(r["accepted_length"])),
    ("speedup", speed),
    ("tokens/s", lambda r: number(r["tokens_per_second"], 1)),
    ("accepted at 1…4", positions),
    ("end to end", functools.partial(speed, end_to_end=True)),
    ("draft ms", lambda r: number(None if unseen(r) else r["draft_ms"], 1)),
    ("verify ms", lambda r: number(r["verify_ms"], 1)),
    ("same tokens", equality),
]


def millions(value: float | None) -> str:
    """12.3M; a dash for nothing."""
    return "–" if not value else f"{value / 1e6:.3g}M" if value < 1e9 else f"{value / 1e9:.3g}B"


def trained(row: Row, key: str) -> float | None:
    return (row.get("training") or {}).get(key)


def minutes(row: Row) -> str:
    seconds = trained(row, "train_seconds")
    return "–" if seconds is None else f"{seconds / 60:.0f}"


def even(limit: float | None) -> str:
    """An accepted length to break even at. No pass is shorter than a plain one: a figure
    below 1 is chance, and beyond chance a doubt."""
    return number(limit) if limit is None or limit > 1 else "1.00"


# What a drafter costs: a table of its own.
COSTS: Columns = [
    ("drafter", lambda r: r["label"]),
    ("parameters", lambda r: millions(r.get("parameters"))),
    ("trained on, tokens", lambda r: millions(trained(r, "tokens_seen"))),
    ("minutes", minutes),
    (
        "peak memory, GiB",
        lambda r: number(r["peak_bytes"] / 2**30 if r.get("peak_bytes") else None, 2),
    ),
    ("draft ms", lambda r: "–" if unseen(r) else interval(r.get("draft_ms_interval"), 1)),
    ("verify ms", lambda r: interval(r.get("verify_ms_interval"), 1)),
    ("breaks even at", lambda r: even(r.get("break_even"))),
    ("accepted length", lambda r: interval(r["accepted_length"])),
]
# Acceptance by position and by rank.
DEPTHS = 6


def by_depth(row: Row, key: str, depth: int) -> str:
    found = next((p for p in row["acceptance_by_position"] if p["position"] == depth), None)
    cell = found and found.get(f"{key}_interval")
    if not found or not cell or cell["mean"] is None:
        return "–"
    text = f"{100 * cell['mean']:.0f}"
    if cell["low"] is None:
        return text
    return f"{text} [{100 * cell['low']:.0f}, {100 * cell['high']:.0f}]"


def ranks(row: Row, depth: int, most: int = 4) -> str:
    """Shares of the accepted candidates at a depth by their place among their siblings."""
    counts = row.get("acceptance_by_rank") or []
    if row["shape"] != "tree" or len(counts) < depth or not sum(counts[depth - 1]):
        return "–"
    total = sum(counts[depth - 1])
    return " ".join(f"{100 * c / total:.0f}" for c in counts[depth - 1][:most])


# Where the time of a decoded token goes, and what would be left to win.
PARTS = {
    "target": "target",
    "drafter": "drafter",
    "distribution": "distribution",
    "verify": "verification",
    "cache": "cache",
    "python": "Python",
}


def part(row: Row, name: str) -> str:
    """1.83 ms per token and its share of the decoding time."""
    found = row.get("breakdown")
    if not found or (row["kind"] == "reference" and name in ("distribution", "verify", "cache")):
        return "–"
    ms, share = (found[key].get(name) or 0.0 for key in ("ms_per_token", "share"))
    return f"{ms:.2f} [{share:.0%}]"


def without(row: Row, name: str) -> str:
    """The speedup if a part took no time; a dash where nothing is drafted or seen."""
    found = (row.get("breakdown") or {}).get("without") or {}
    return "–" if row["shape"] == "none" or found.get(name) is None else f"{found[name]:.2f}×"


TIMES: Columns = [
    ("drafter", lambda r: r["label"]),
    (
        "ms per token",
        lambda r: number(
            sum(r["breakdown"]["ms_per_token"].values()) if r.get("breakdown") else None
        ),
    ),
    *(
        (label, functools.partial(lambda name, r: part(r, name), name))
        for name, label in PARTS.items()
    ),
    ("speedup", speed),
    ("with a free drafter", lambda r: without(r, "drafter")),
    ("target alone", lambda r: without(r, "all_but_target")),
]
SPARE = ("end to end", "draft ms", "verify ms")


def columns_of(report: dict[str, Any]) -> Columns:
    """The columns that say something about this report (token equality only at T = 0)."""
    return [c for c in COLUMNS if c[0] != "same tokens" or report["settings"]["temperature"] == 0]


def title(report: dict[str, Any]) -> str:
    s = report["settings"]
    distribution = distribution_of(s["temperature"])
    distribution += f", top-k {s['top_k']}" if s["top_k"] else ""
    distribution += f", top-p {s['top_p']:g}" if s["top_p"] < 1 else ""
    return f"{report['target']['name']} · {distribution} · {requested(s)}"


def distribution_of(temperature: float) -> str:
    return "greedy (T = 0)" if temperature == 0 else f"T = {temperature:g}"


def requested(s: dict[str, Any]) -> str:
    """How a report's prompts were answered, from its settings."""
    return f"{s['dtype']} · batch {s['batch_size']} · {s['num_prompts']} prompts"


def table(report: dict[str, Any], **more: Any) -> Table:
    """The drafters of a report, with what its reader must know. more: fields of the table."""
    more = {"title": title(report), "notes": notes(report), "spare": SPARE} | more
    return Table.of(columns_of(report), report["drafters"], **more)


def by_suite(found: dict[str, Any]) -> Table:
    """Accepted length and speedup of every drafter, by suite."""
    head = ("suite", "drafter", "accepted length", "speedup")
    rows = [
        [
            f"{one['name']} ({one['asked']} prompts)",
            row["name"],
            interval(row["accepted_length"]),
            speed(row),
        ]
        for one in found["suites"]
        for row in one["drafters"]
    ]
    notes = [f"left out: {line}" for line in found["missing"]]
    return Table(head, rows, "accepted length, speedup by suite", notes, words=(0, 1))


def ranking(report: dict[str, Any]) -> Table:
    """The order of the rows that draft, ranks shared where the intervals cannot part them."""
    label = {r["name"]: r["label"] for r in report["drafters"]}
    cells_of = "statistically tied with"
    columns: Columns = [
        ("drafter", lambda r: f"{r['rank']}{'=' if r['tied_with'] else '.'} {r['label']}"),
        ("speedup", lambda r: interval(r["speedup"], 2, "×")),
        (cells_of, lambda r: ", ".join(label[n] for n in r["tied_with"]) or "–"),
    ]
    return Table.of(
        columns,
        report["ranking"],
        title=f"ranking, {title(report)}",
        notes=[
            "the fastest first; a rank is 1 + how many of these rows are faster beyond chance "
            "(95 %, paired); = marks rows that chance may have parted from another"
        ],
        words=(0, -1),
        prose=(cells_of,),
    )


def notes(report: dict[str, Any]) -> list[str]:
    """What a reader of the table must know."""
    resampled = (
        "prompts" if report["settings"]["batch_size"] == 1 else "prompts (times: chunks of prompts)"
    )
    lines = [
        "accepted length counts the bonus token, over cycles that no stop token or limit cut and "
        f"that lie in no loop; brackets: 95 % bootstrap over {resampled}; speedup: against none in "
        "the same interleaved run, decoding alone."
    ]
    if any(row["acceptance_by_position"] for row in report["drafters"]):
        lines.append(
            "accepted at d: of the cycles that proposed depth d and accepted d - 1, the share that "
            "accepted d."
        )
    if any(row.get("lossless") for row in report["drafters"]):
        lines.append(f"same tokens: {SAME}.")
    lines += _warnings(report)
    for row in report["drafters"]:
        lines += _doubts(row, report["target"])
    categories = report["drafters"][0]["by_category"]
    once = [name for name, cell in categories.items() if cell["prompts"] == 1]
    if once:
        lines.append(f"Seen once, so without an interval: {', '.join(once)}.")
    if any(r["kind"] == "reference" and r["max_depth"] for r in report["drafters"]):
        lines.append(
            "hf_ rows are transformers' own loops: their cycles are read off the target's passes, "
            "verify ms is the pass alone, and a dash stands where nothing can be seen from outside."
        )
    if any(SERVER.fullmatch(r["name"]) for r in report["drafters"]):
        lines.append(
            "NAME@URL rows are running servers: decoding is what an answer takes longer than its "
            "first token, accepted length comes from their own totals; a dash: it tells none."
        )
    if len(report.get("sittings", [])) > 1:
        lines.append(
            f"The run was stopped and went on: measured in {len(report['sittings'])} sittings. All "
            "drafters answered a prompt in one of them, and speedups compare within prompts."
        )
    if report["skipped_turns"]:
        lines.append(
            f"{len(report['skipped_turns'])} later turns outgrew the context and were left out for "
            "all."
        )
    return lines + [f"skipped {one['name']}: {one['reason']}" for one in report["skipped"]]


def stalls(found: dict[str, Any]) -> list[str]:
    """What a run's stalls of the machine cost, of a report's `stalls`, a note each."""
    stall = f"met a stall of the machine (over {FAR:g} times the usual time of a pass) and"
    lines = []
    if again := found["timed_again"]:
        some = f"{len(again)} of {found['units']} prompts"
        lines.append(f"{some} {stall} were timed again with all drafters.")
    if out := found["left_out"]:
        lines.append(f"{len(out)} of {found['units']} prompts {stall} are left out of all times.")
    if passes := found["passes"]:
        some = ", ".join(f"{count} of {name}" for name, count in passes.items())
        lines.append(f"Passes that {stall} are left out of times: {some}.")
    return lines


def _warnings(report: dict[str, Any]) -> list[str]:
    """What puts the whole table in doubt."""
    lines = []
    lines += stalls(report["stalls"])
    wrong = [
        r["label"] for r in report["drafters"] if (r.get("lossless") or {}).get("beyond_rounding")
    ]
    if wrong:
        lines.append(
            f"NOT LOSSLESS beyond rounding: {', '.join(wrong)}; see `lossless` in report.json."
        )
    return lines


def _doubts(row: Row, target: dict[str, Any]) -> list[str]:
    """What speaks against a drafter."""
    lines = []
    limit, length = row.get("break_even"), row["accepted_length"]["mean"]
    lines += [f"IN DOUBT {DOUBT}: the speed of {row['label']}: {why}." for why in row["doubts"]]
    if not row["doubts"] and limit is not None and length is not None and length < limit:
        lines.append(
            f"{row['label']} is not faster here: its cycles take {limit:.2f} plain tokens' "
            "time and "
            f"give {length:.2f} tokens."
        )
    if (row.get("parameters") or 0) >= (target.get("parameters") or float("inf")):
        lines.append(
            f"{row['label']} is no smaller than its target ({millions(row['parameters'])} "
            f"parameters); it would have to reach an accepted length of {number(limit)}."
        )
    return lines
