"""The tables of docs/lossless.md, rendered from docs/results/lossless.json, sound-seeds.json and
places.json; a test compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from outrider.scripts.common import files
from outrider.scripts.reports import certificate_page
from outrider.scripts.reports.block import Block
from outrider.scripts.reports.table import Table

RESULTS = files.ROOT / "docs" / "results" / "lossless.json"
BLOCK = Block.of("docs/lossless.md", "figures", "scripts/lab/prove.py")
SOUND = files.ROOT / "docs" / "results" / "sound-seeds.json"
PLACES = files.ROOT / "docs" / "results" / "places.json"
PLACE_BLOCK = Block.of("docs/lossless.md", "places", "scripts/lab/proofs/placed.py")
MORE = ", more tokens"  # ends the name of a bias that is drawn again with more tokens
DOUBTFUL = 12  # tests of a certificate that the results keep


def slim(paper: dict[str, Any]) -> dict[str, Any]:
    """A certificate without folders, plots' data and all but its most doubtful tests."""
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
    known = _in_todays_words(known)
    parts = [Table(("what", "how much", "found"), [*_rows(known)], words=(0, 1, 2))]
    if "certificates" in known:
        parts.append(_certificates(known["certificates"]))
    if "controls" in known:
        parts.append(_controls(known["controls"]))
    return "\n\n".join(table.markdown() for table in parts) + "\n"


def _in_todays_words(value: Any) -> Any:
    """Figures with what version 0.1 called a law by its name of today; keys stay."""
    if isinstance(value, str):
        return re.sub(r"\blaw(s?)\b", r"distribution\1", value)
    if isinstance(value, list):
        return [_in_todays_words(item) for item in value]
    if isinstance(value, dict):
        return {key: _in_todays_words(item) for key, item in value.items()}
    return value


def refresh() -> None:
    """Put the committed figures into the page. Raises ValueError where a line is missing."""
    BLOCK.write(render(figures()))
    PLACE_BLOCK.write(places(json.loads(PLACES.read_text())))


def figures() -> dict[str, Any]:
    """What the tables show: the exact layers and certificates, and the sound seeds."""
    return json.loads(RESULTS.read_text()) | {"sound": json.loads(SOUND.read_text())}


def places(known: dict[str, Any]) -> str:
    """Biases at one kind of place or by a key, and how many tokens find them; below, the other
    seeds."""
    rows, again = [], []
    for name, first in known.items():
        if name.endswith(MORE):
            continue
        runs = [first, known[name + MORE]] if name + MORE in known else [first]
        tried = "; ".join(f"{_p(run)} after {run['tokens']:,}" for run in runs)
        found = next((f"{r['tokens']:,}" for r in runs if _always(r)), "more than were drawn")
        last = next((run for run in runs if run["rejected"]), runs[-1])
        rows.append(
            [
                name,
                f"{first['share_of_places']:.1%}",
                f"{first['total_variation_there']:.2g}",
                f"{first['mean_total_variation']:.2g}",
                tried,
                found,
                last["by"] if last["rejected"] else "–",
            ]
        )
        again += [_again(name, run) for run in runs if "seeds" in run]
    head = ("biased at", "places", "bias there", "bias of all", "p", "tokens that find it", "by")
    return "\n\n".join([Table(head, rows, words=(0, 4, -1)).markdown(), *again]) + "\n"


def _always(run: dict[str, Any]) -> bool:
    """Whether the run was rejected, and where it was drawn under other seeds every one of them."""
    seeds = run.get("seeds", {"p": [], "rejected": 0})
    return bool(run["rejected"] and seeds["rejected"] == len(seeds["p"]))


def _p(run: dict[str, Any]) -> str:
    return f"{run['p']:.1g}" if run["p"] else "below 1e-300"


def _again(name: str, first: dict[str, Any]) -> str:
    """What the case came to under seeds that nothing was made on."""
    said, p = first["seeds"], first["seeds"]["p"]
    which = f"seeds {said['first']} to {said['first'] + len(p) - 1}"
    return (
        f"*{name[0].upper()}{name[1:]}* under {which}, {first['tokens']:,} tokens each: "
        f"{said['rejected']} of {len(p)} rejected, the largest p {max(p):.1g}."
    )


# section -> what, how much, found
SHOWN = {
    "enumeration": (
        "one verification, every branch",
        "{cases:,} random worlds, up to {max_vocab} tokens and {max_nodes} nodes, {branches:,} "
        "branches",
        "distribution off by at most {max_error:.1e} (limit {limit:g})",
    ),
    "engine": (
        "the whole loop, every branch",
        "{runs} drafters × distributions × rules, outputs of {length} of {vocab} tokens, "
        "{branches:,} "
        "branches",
        "distribution off by at most {max_error:.1e} (limit {limit:g})",
    ),
    "controls": ("known wrong code (below)", "{controls} controls", "{rejected} rejected"),
    "biased": (
        "biased decoders, certificate's sampling layer",
        "{decoders} of total variation {variation:g} and two that one order of the tokens cannot "
        "see, {tokens:,} tokens each",
        "{rejected} rejected at alpha = {alpha:g}",
    ),
    "sound": (
        "the engine's own rule, the same layer",
        "{seeds} seeds, {tokens:,} tokens each",
        "{rejected} rejected at alpha = {alpha:g}, smallest p = {smallest:.2g}; p-values "
        "uniform in {uniform} of {tests} tests",
    ),
}


def _rows(known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The first table, section by section."""
    for name, message in SHOWN.items():
        if name in known:
            row = known[name]
            if name == "sound":
                row = row | {"seeds": len(row["p"]), "uniform": row["tests"] - len(row["odd"])}
            yield tuple(cell.format(**row) for cell in message)
            if name == "enumeration":
                yield "traversal against rejection", "the same worlds", _less(known[name])
    for r in known["greedy"]["rows"] if "greedy" in known else ():
        what = f"greedy, {known['greedy']['target']['name']}, {r['drafter']}, B = {r['batch_size']}"
        words = f"{r['equal']} equal, {r['rounding_ties']} rounding ties, {r['defects']} defects"
        yield what, f"{r['prompts']} prompts, {r['tokens']:,} tokens", words


def _less(e: dict[str, Any]) -> str:
    """Where traversal accepts less than rejection."""
    less = e["traversal_accepts_less"]
    fewer = f"accepts less on {less['chains']} chains and {less['trees']} trees"
    some = less["chains"] or less["trees"]
    return f"{fewer}, by at most {less['largest']:.1e}" if some else fewer


def _certificates(e: dict[str, Any]) -> Table:
    head = ("certificate", "settings", "tokens", "p (alpha)", "smallest bias found")
    wrong = {
        "typical acceptance": "typical acceptance",
        "draft scored with the wrong distribution": "wrong draft distribution",
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
        missed = certificate_page.never_found(power)
        if missed and power["min_detectable"] is not None:
            families = power["families"]
            seen = [row["min_detectable"] for name, row in families.items() if name not in missed]
            least = f"{max(seen, default=0):.1%} ({len(seen)} of {len(families)} families)"
        cut = f", top-p {s['top_p']:g}" if s["top_p"] != 1 else ""
        words = f"T = {s['temperature']:g}{cut}, {s['dtype']}"
        verdict = ": ".join([paper["verdict"], *paper["reasons"][:1]])
        cells = [s["drafter"], words, f"{power['tokens']:,}", p, least]
        rows.append([*cells, *(by.get(name, "–") for name in wrong), verdict])
    return Table([*head, *wrong.values(), "verdict"], rows, words=(0, 1, -1))


def _controls(e: dict[str, Any]) -> Table:
    rows = []
    for r in e["rows"]:
        layer = r["layer"] if r["rejected"] else "NOTHING"
        rows.append([r["name"], layer, f"{r['measured']:.2g}", f"{r['correct_code']:.1g}"])
    head = ("known wrong code", "caught by", "measured there", "correct code")
    return Table(head, rows, words=(0, 1))
