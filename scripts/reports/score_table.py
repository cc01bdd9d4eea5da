"""The score table, and the notes that go with it."""

from __future__ import annotations

from typing import Any

from outrider.scripts.reports.table import DOUBT, Table, interval, number, ratio
from outrider.scripts.scoring.pace import FAR

Row = dict[str, Any]
WORDS = {
    "accepted length": "tokens that a pass over the target gives, bonus token included; without "
    "cycles cut by a stop token or the limit, or inside a loop",
    "break even": "the accepted length at which such a drafter is as fast as plain decoding",
    "speedup": "tokens per second over those of none in the same interleaved run, decoding alone; "
    "end to end: with the prefill",
    "rank": "1 + how many of these drafters are faster beyond chance (95 %, paired); =: as fast as "
    "another one, up to chance",
    "accepted at 1…4": "of the cycles that proposed that depth and accepted the one before, the "
    "share that accepted it",
    "brackets": "95 % bootstrap over prompts (of times: over prompts that ran together)",
}


def speed(row: Row) -> str:
    """Return the speed of a report's row over plain decoding; marked where that is in
    doubt."""
    return ratio(row["speedup"], row["doubts"])


def positions(row: Row, most: int = 4) -> str:
    """Conditional acceptance at the first depths, as percentages."""
    known = (p["conditional"] for p in row["acceptance_by_position"][:most])
    return " ".join(f"{share:.0%}" for share in known if share is not None) or "–"


def equality(row: Row) -> str:
    """Return answers that equal those of `none` token by token, and others; see `notes`."""
    found = row.get("lossless")
    if not found:
        return "–"
    text = f"{found['equal']}/{found['checked']}"
    text += f" +{found['within_rounding']}≈" if found["within_rounding"] else ""
    return text + (f" !{found['beyond_rounding']}" if found["beyond_rounding"] else "")


def even(limit: float | None) -> str:
    """Return an accepted length to break even at. No pass is shorter than a plain one: a
    figure below 1 is chance, and beyond chance a doubt."""
    return number(limit) if limit is None or limit > 1 else "1.00"


def distribution_of(temperature: float) -> str:
    return "greedy (T = 0)" if temperature == 0 else f"T = {temperature:g}"


def requested(s: dict[str, Any]) -> str:
    """Return how a report's prompts were answered, from its settings."""
    return f"{s['dtype']} · batch {s['batch_size']} · {s['num_prompts']} prompts"


def title(report: dict[str, Any]) -> str:
    s = report["settings"]
    distribution = distribution_of(s["temperature"])
    distribution += f", top-k {s['top_k']}" if s["top_k"] else ""
    distribution += f", top-p {s['top_p']:g}" if s["top_p"] < 1 else ""
    return f"{report['target']['name']} · {distribution} · {requested(s)}"


def table(report: dict[str, Any], **more: Any) -> Table:
    """Return the drafters of a report, with what its reader must know. more: fields of the
    table."""
    ranks = {
        one["name"]: f"{one['rank']}{'=' * bool(one['tied_with'])}" for one in report["ranking"]
    }
    columns: list[tuple[str, Any]] = [
        ("drafter", lambda r: r["label"]),
        ("speedup", speed),  # on a phone the first columns are on the screen
        ("accepted length", lambda r: interval(r["accepted_length"])),
        ("break even", lambda r: even(r["break_even"])),
        ("end to end", lambda r: ratio(r["end_to_end"]["speedup"], r["doubts"])),
        ("rank", lambda r: ranks.get(r["name"], "–")),
        ("tokens/s", lambda r: number(r["tokens_per_second"], 1)),
        ("accepted at 1…4", positions),
    ]
    if report["settings"]["temperature"] == 0:
        columns.append(("same as none", equality))
    more = {"title": title(report), "notes": notes(report)} | more
    return Table.of(columns, report["drafters"], **more)


def notes(report: dict[str, Any]) -> list[str]:
    """Return what was found beside the figures, a line each."""
    rows = report["drafters"]
    lines = stalls(report["stalls"])
    if all(row["speedup"]["mean"] is None for row in rows):
        lines.append("No answer went beyond its first token: give more max_new_tokens.")
    unknown = [r for r in rows if r["accepted_length"]["mean"] is None]
    if cut := [r["label"] for r in unknown if r["cut_cycles"]["cycles"]]:
        lines.append(
            f"A stop token or the limit cut every cycle of {', '.join(cut)}: no accepted length; "
            "give more max_new_tokens."
        )
    compared = {r["label"]: r["lossless"] for r in rows if r.get("lossless")}
    asked = report["settings"]["num_prompts"]
    if more := [found["checked"] for found in compared.values() if found["checked"] > asked]:
        lines.append(f"same as none: {asked} prompts have {max(more)} turns, an answer each.")
    if near := [label for label, found in compared.items() if found["within_rounding"]]:
        lines.append(
            f"+k≈ ({', '.join(near)}): k answers part where two tokens are equally likely up to "
            "rounding; either is the model's own."
        )
    wrong = [label for label, found in compared.items() if found["beyond_rounding"]]
    if wrong:
        lines.append(
            f"NOT LOSSLESS beyond rounding (!k): {', '.join(wrong)}; see `lossless` in report.json."
        )
    lines += doubted({row["label"]: row["doubts"] for row in rows})
    if outgrown := len(report["skipped_turns"]):
        lines.append(f"{outgrown} later turns outgrew the context and were left out for all.")
    return lines + [f"skipped {one['name']}: {one['reason']}" for one in report["skipped"]]


def stalls(found: dict[str, Any]) -> list[str]:
    """Return what a run's stalls of the machine cost, of a report's `stalls`, a note each."""
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


def doubted(doubts: dict[str, list[str]]) -> list[str]:
    """Return why speeds cannot be believed, a note for every reason. doubts: of rows by name."""
    reasons: dict[str, list[str]] = {}
    for label, found in doubts.items():
        for why in found:
            reasons.setdefault(why, []).append(label)
    return [f"IN DOUBT {DOUBT} ({', '.join(of)}): {why}." for why, of in reasons.items()]
