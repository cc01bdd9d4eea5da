"""The table of scripts/mutants.py: which layer rejected how many mutants, and those that got
through.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.reports.block import md_table

# "equivalent": nothing that can be observed changes. "not the law": speed, acceptance, records
# or words change alone. "gone": it got through, and the line that it changed is no more.
GONE = "gone"
KINDS = ("equivalent", "not the law", GONE)
LAYERS = ("enumeration", "tests", "certificate")
Row = dict[str, Any]


def reasons(path: Path) -> dict[str, dict[str, str]]:
    """By mutant, its kind and why, from a file such as docs/results/mutants-harmless.json; none
    without a file."""
    return {row["mutant"]: row for row in json.loads(path.read_text())} if path.exists() else {}


def let_through(row: Row) -> bool:
    """Whether nothing rejected a mutant, or, where it changes the law, no certificate did."""
    if row["kind"] == "equivalent":
        return False
    return not _caught(row) or (row["kind"] == "law" and not row.get("certificate"))


def summary(rows: Sequence[Row], reasons: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Counts by module and in all. Rows get their kind ("law" where no reason says otherwise)
    and reason.

    open: keys of mutants that nothing rejected, then or again. missed: those that change the
    law and that no certificate rejects, then or again. since: those that were let through and
    are rejected since. gone: let through, and the line is gone. contradicted: reasons for
    mutants that a layer rejects all the same.
    """
    for row in rows:
        given = reasons.get(row["key"], {})
        row["kind"], row["reason"] = given.get("kind", "law"), given.get("reason", "")
        if row["kind"] not in ("law", *KINDS):
            raise ValueError(f"{row['key']}: kind {row['kind']!r}; use one of {', '.join(KINDS)}")
    modules = list(dict.fromkeys(row["file"] for row in rows))
    counts = {name: _counts([r for r in rows if r["file"] == name]) for name in modules}
    let = [row for row in rows if let_through(row)]
    now = {row["key"]: {**row, **row.get("again", {})} for row in let}
    still = [row for row in now.values() if row["kind"] != GONE and let_through(row)]
    there = [now.get(row["key"], row) for row in rows if row["kind"] != GONE]
    return {
        "all": _counts(rows),
        "now": _counts(there),
        "modules": counts,
        "open": [r["key"] for r in still if not _caught(r)],
        "missed": [r["key"] for r in still if _caught(r)],
        "since": [key for key in now if key not in {row["key"] for row in still}],
        "contradicted": [r["key"] for r in rows if r["kind"] == "equivalent" and _caught(r)],
    }


def _caught(row: Row) -> bool:
    return any(row.get(layer) for layer in LAYERS)


def _counts(rows: Sequence[Row]) -> dict[str, Any]:
    law = [r for r in rows if r["kind"] == "law"]
    judged = [r for r in rows if r["kind"] != "equivalent"]
    found: dict[str, Any] = {"mutants": len(rows), "equivalent": len(rows) - len(judged)}
    found |= {layer: sum(bool(r.get(layer)) for r in rows) for layer in LAYERS}
    found["something"] = sum(_caught(r) for r in judged)
    found["judged"], found["law"] = len(judged), len(law)
    found["law by certificate"] = sum(bool(r.get("certificate")) for r in law)
    silent = [
        r for r in law if (r.get("certificate") or {}).get("layer") not in ("raised", "ended")
    ]
    found["silent law"] = len(silent)
    found["silent law by certificate"] = sum(bool(r.get("certificate")) for r in silent)
    return found


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def line(found: dict[str, Any]) -> str:
    """The result in a sentence."""
    a = found["all"]
    return (
        f"{_share(a['something'], a['judged'])} rejected by something; of those that "
        "change the law "
        f"{_share(a['law by certificate'], a['law'])} by the certificate"
    )


def page(found: dict[str, Any]) -> str:
    """Markdown."""
    a = found["all"]
    text = [
        "# Mutants",
        "",
        "One wrong edit at a time in the code that guards the law, and which layer "
        "rejects it. Written by",
        f"`{found['command']}` (commit `{found['environment']['commit']}`); all mutants "
        "with what rejected them are in",
        "[results/mutants.json](results/mutants.json), the reasons for those that do not "
        "change the law in",
        "[results/mutants-harmless.json](results/mutants-harmless.json).",
        "",
        f"- Rejected by something: {_share(a['something'], a['judged'])}, "
        f"{a['equivalent']} equivalent ones left out.",
        f"- Of those that change the law, rejected by a certificate of {found['tokens']:,} tokens: "
        f"{_share(a['law by certificate'], a['law'])}; of those that run to the end of it: "
        f"{_share(a['silent law by certificate'], a['silent law'])}.",
        *_again(found),
        "",
    ]
    head = ("module", "mutants", "equivalent", "enumeration", "unit tests", "certificate")
    cells: list[list[str]] = []
    for name, c in [*found["modules"].items(), ("**all**", a)]:
        name = name if name.startswith("*") else f"`{name}`"
        counts = [
            str(c[k]) for k in ("mutants", "equivalent", "enumeration", "tests", "certificate")
        ]
        something = _share(c["something"], c["judged"])
        cells.append([name, *counts, something, _share(c["law by certificate"], c["law"])])
    text.append(md_table([*head, "something", "law, certificate"], cells))
    for title, key in (
        ("Nothing rejects", "open"),
        ("No certificate rejects, though the law changes", "missed"),
    ):
        text += ["", f"## {title}", ""]
        text += [f"- `{k}`" for k in found[key]] or ["None."]
    if found["since"]:
        text += ["", "## Let through then, rejected since", ""]
        rows = {row["key"]: row for row in found["mutants"]}
        text += [f"- `{key}`: {_since(rows[key])}" for key in found["since"]]
    return "\n".join(text) + "\n"


def _again(found: dict[str, Any]) -> list[str]:
    """What became of those that were let through, in a line."""
    if "again" not in found:
        return []
    n = found["now"]
    return [
        f"- Those that were let through, tried again at commit "
        f"`{found['again']['environment']['commit']}`: {len(found['since'])} are rejected since. "
        f"With them: {_share(n['something'], n['judged'])} rejected by something, "
        f"{_share(n['law by certificate'], n['law'])} of those that change the law by a "
        "certificate.",
    ]


def _since(row: Row) -> str:
    if row["kind"] == GONE:
        return str(row["reason"])
    found = row["again"]
    layer = next(name for name in reversed(LAYERS) if found.get(name))
    return f"{layer}, {found[layer]['why']}"
