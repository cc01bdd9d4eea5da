"""Choosing among drafters: from folders, repositories and families to rows, and from measured
rows to a ranking.

A rank is claimed only where it was measured: a row stands behind another one when the 95 %
interval of their paired speed ratio lies on one side of 1. Rows that none is clearly faster
than share a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.heads import head_in, kinds
from outrider.heads.checkpoint import CARD, read_card
from outrider.heads.folders import is_plain
from outrider.heads.names import members, split
from outrider.scripts.scoring.addresses import SERVER
from outrider.scripts.scoring.names import ASSISTED, GENERATE, LOOKUP

WITHOUT_SHAPE = ("none", "ngram", GENERATE, LOOKUP)


def expand(names: Sequence[str], runs: str, trees: bool) -> tuple[list[str], list[dict[str, str]]]:
    """(drafters to load, [{name, reason}] of names that mean nothing).

    A name is a drafter as it is written elsewhere, a run, head or model folder, a repository,
    a folder of such folders, or a family (a kind of head: every run below `runs` of that
    kind). Folders are tried as chain and, with `trees`, as tree.
    """
    specs: list[str] = []
    skipped: list[dict[str, str]] = []
    for name in names:
        try:
            family = name in kinds() and not Path(name).exists()
            found = _family(name, runs, skipped) if family else _folders(name)
        except UserError as error:
            skipped.append({"name": name, "reason": str(error)})
            continue
        for one in found:
            if _is_spelled_out(one):
                specs.append(one)
            else:
                specs += [f"{one}@chain", *([f"{one}@tree"] if trees else [])]
    return list(dict.fromkeys(specs)), skipped


def _is_spelled_out(name: str) -> bool:
    """Whether `name` says how it drafts, or has no shape to choose."""
    known = name in WITHOUT_SHAPE or name.startswith(f"{ASSISTED}@") or SERVER.fullmatch(name)
    return bool(known) or len(members(name)) > 1 or bool(split(name)[1])


def _family(kind: str, runs: str, skipped: list[dict[str, str]]) -> list[str]:
    """Every run below `runs` of this kind; a run whose head is damaged goes to `skipped`."""
    found = []
    for folder in _children(Path(runs).expanduser()):
        head = head_in(str(folder))
        if head is None:
            continue
        try:
            card = read_card(head)
        except UserError as error:
            skipped.append({"name": str(folder), "reason": str(error)})
            continue
        if card["kind"] == kind:
            found.append(str(folder))
    if not found:
        raise UserError(
            f"candidates: {kind}: no run of this kind below {runs}; set runs=FOLDER, or "
            "name the run"
        )
    return found


def _folders(name: str) -> list[str]:
    folder = Path(name).expanduser()
    if _is_spelled_out(name) or is_plain(name) or not folder.is_dir() or _is_run(folder):
        return [name]  # what it lacks is said when it is loaded
    found = [str(child) for child in _children(folder) if _is_run(child) or is_plain(str(child))]
    if not found:
        raise UserError(
            f"candidates: {name}: neither a drafter nor a folder of drafters; give run folders, "
            "head folders or model folders"
        )
    return found


def _is_run(folder: Path) -> bool:
    if (folder / CARD).is_file() or (folder / "metrics.jsonl").is_file():
        return True
    return any((folder / name / CARD).is_file() for name in ("head", "best"))


def _children(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def claims(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(faster, slower) of every pair of drafters that the interval of their paired speed ratio
    parts."""
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
    return found


def ranking(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that draft, the fastest first: {name, label, rank, speedup, beaten_by, tied_with}.
    beaten_by: rows that are clearly faster; tied_with: rows of the same rank from which this
    one cannot be told apart."""
    faster = set(claims(report))  # (a, b): a is clearly faster than b
    rows = [
        r
        for r in report["drafters"]
        if r["kind"] != "reference" and r["tokens_per_second"] is not None
    ]
    rows.sort(key=lambda r: -r["tokens_per_second"])
    found = []
    for row in rows:
        beaten = [r["name"] for r in rows if (r["name"], row["name"]) in faster]
        tied = [
            r["name"]
            for r in rows
            if r is not row and r["name"] not in beaten and (row["name"], r["name"]) not in faster
        ]
        found.append(
            {
                "name": row["name"],
                "label": row["label"],
                "rank": 1 + len(beaten),
                "speedup": row["speedup"],
                "beaten_by": beaten,
                "tied_with": tied,
            }
        )
    return sorted(found, key=lambda row: row["rank"])  # stable: the faster first
