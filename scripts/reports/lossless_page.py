"""The table of figures in docs/lossless.md, rendered from docs/results/lossless.json; a test
compares the two.
"""

from __future__ import annotations

import json
from typing import Any

from scripts.common import files
from scripts.reports.block import Block, md_table

RESULTS = files.ROOT / "docs" / "results" / "lossless.json"
BLOCK = Block(
    files.ROOT / "docs" / "lossless.md",
    "<!-- figures: written by scripts/prove.py -->",
    "<!-- end of figures -->",
)
DOUBTFUL = 12  # tests of a certificate that the results keep


def slim(paper: dict[str, Any]) -> dict[str, Any]:
    """A certificate without folders of this machine and without its plots' data; of its tests,
    the most doubtful.
    """
    layers = [
        {k: v for k, v in layer.items() if k not in ("histograms", "distribution", "divergences")}
        for layer in paper["layers"]
    ]
    for layer in layers:
        if "tests" in layer:
            layer["tests"] = sorted(layer["tests"], key=lambda test: test["p"])[:DOUBTFUL]
    settings = {k: v for k, v in paper["settings"].items() if k not in ("out", "quiet")}
    target = {k: v for k, v in paper["identities"]["target"].items() if k != "path"}
    kept = (
        "verdict",
        "reasons",
        "created",
        "command",
        "negative_controls",
        "controls",
        "power",
        "shape",
        "versions",
    )
    return {
        **{k: paper[k] for k in kept},
        "layers": layers,
        "settings": settings,
        "identities": {**paper["identities"], "target": target},
    }


def render(known: dict[str, Any]) -> str:
    """The tables of the page."""
    rows = [row for name, write in ROWS.items() if name in known for row in write(known[name])]
    parts = [md_table(("what", "how much", "found"), rows, (0, 1, 2)), ""]
    if "certificates" in known:
        parts += [_certificates(known["certificates"]), ""]
    if "controls" in known:
        parts += [_controls(known["controls"]), ""]
    return "\n".join(parts)


def refresh() -> None:
    """Put the figures of the committed JSON into the page. Raises ValueError when the lines
    around them are missing.
    """
    BLOCK.write(render(json.loads(RESULTS.read_text())))


def _enumeration(e: dict[str, Any]) -> list[tuple[str, str, str]]:
    less = e["traversal_accepts_less"]
    found = f"law off by at most {e['max_error']:.1e} (limit {e['limit']:g})"
    fewer = f"on {less['chains']} chains and {less['trees']} trees"
    if less["chains"] or less["trees"]:
        fewer += f", by at most {less['largest']:.1e}"
    size = (
        f"{e['cases']:,} random worlds, up to {e['max_vocab']} tokens and {e['max_nodes']} nodes, "
    )
    return [
        ("one verification, every branch", f"{size}{e['branches']:,} branches", found),
        ("traversal against rejection", "the same worlds", f"accepts less {fewer}"),
    ]


def _engine(e: dict[str, Any]) -> list[tuple[str, str, str]]:
    much = f"{e['runs']} drafters × laws × rules, outputs of {e['length']} of {e['vocab']} tokens, "
    return [
        (
            "the whole loop, every branch",
            f"{much}{e['branches']:,} branches",
            f"law off by at most {e['max_error']:.1e} (limit {e['limit']:g})",
        )
    ]


def _greedy(e: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = []
    for r in e["rows"]:
        what = f"greedy, {e['target']['name']}, {r['drafter']}, B = {r['batch_size']}"
        words = f"{r['equal']} equal, {r['rounding_ties']} rounding ties, {r['defects']} defects"
        found.append((what, f"{r['prompts']} prompts, {r['tokens']:,} tokens", words))
    return found


def _biased(e: dict[str, Any]) -> list[tuple[str, str, str]]:
    odd = "two that one order of the tokens cannot see"
    size = f"{e['decoders']} of total variation {e['variation']:g} and {odd}"
    return [
        (
            "biased decoders, certificate's sampling layer",
            f"{size}, {e['tokens']:,} tokens each",
            f"{e['rejected']} rejected at alpha = {e['alpha']:g}",
        )
    ]


def _sound(e: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = (
        f"{e['rejected']} rejected at alpha = {e['alpha']:g}, smallest p = {e['smallest_p']:.2g}"
    )
    return [
        ("sound decoder, the same layer", f"{e['seeds']} seeds, {e['tokens']:,} tokens each", found)
    ]


def _caught(e: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [("known wrong code (below)", f"{e['controls']} controls", f"{e['rejected']} rejected")]


ROWS = {
    "enumeration": _enumeration,
    "engine": _engine,
    "controls": _caught,
    "biased": _biased,
    "sound": _sound,
    "greedy": _greedy,
}


def _certificates(e: dict[str, Any]) -> str:
    head = ("certificate", "settings", "tokens", "p (alpha)", "smallest bias found")
    wrong = {
        "typical acceptance": "typical acceptance",
        "draft scored with the wrong law": "wrong draft law",
    }
    rows = []
    for paper in e["rows"]:
        s, power = paper["settings"], paper["power"]
        sampling = next((layer for layer in paper["layers"] if layer["name"] == "sampling"), None)
        p = f"{sampling['p']:.2g} ({sampling['alpha']:g})" if sampling else "–"
        by = {
            c["name"]: f"p = {c['p']:.1e} after {c['tokens']:,}"
            + (" at T = 1" if c.get("faint") else "")
            for c in paper["negative_controls"]
            if c["layer"] == "sampling"
        }
        least = f"{power['min_detectable']:.1%}" if power.get("min_detectable") else "–"
        words = (
            f"T = {s['temperature']:g}"
            + (f", top-p {s['top_p']:g}" if s["top_p"] != 1 else "")
            + f", {s['dtype']}"
        )
        verdict = ": ".join([paper["verdict"], *paper["reasons"][:1]])
        cells = [s["drafter"], words, f"{power['tokens']:,}", p, least]
        rows.append([*cells, *(by.get(name, "–") for name in wrong), verdict])
    return md_table([*head, *wrong.values(), "verdict"], rows, (0, 1, -1))


def _controls(e: dict[str, Any]) -> str:
    rows = [
        [
            r["name"],
            r["layer"] if r["rejected"] else "NOTHING",
            f"{r['measured']:.2g}",
            f"{r['correct_code']:.1g}",
        ]
        for r in e["rows"]
    ]
    return md_table(
        ("known wrong code", "caught by", "measured there", "correct code"), rows, (0, 1)
    )
