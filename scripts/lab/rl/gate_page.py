"""The tables of docs/rl-gate.md, rendered from docs/results/rl-gate.json; a test compares the
two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.scripts.common import files
from outrider.scripts.reports.block import Block
from outrider.scripts.reports.table import Table

RESULTS = files.ROOT / "docs/results/rl-gate.json"
BLOCK = Block.of("docs/rl-gate.md", "figures", "scripts/lab/rl/gate_power.py")
NONE: dict[str, Any] = {"rules": {}}
NUMBERS, RANKS = "three numbers", "with ranks"


def render(known: dict[str, Any]) -> str:
    """All tables of the page."""
    kinds = [f"{kind}, tolerance {t}" for t in (0, 0.01) for kind in KINDS]
    sound = Table(("sound engine", "alpha", *kinds), [*_sound(known)], words=(0,))
    columns = ("said no, of how many", "tokens, half of them", "tokens, nine in ten", "by")
    wrong = Table(("engine", *columns), [*_wrong(known)], words=(0, 4))
    head = (
        "engine",
        "tokens looked at",
        "off there, standard deviations",
        "by",
        "tokens (extrapolated)",
    )
    drift = Table(head, [*_drift(known)], words=(0, 3))
    names = ("GRPO by TRL", "steps", "tokens", "p", "verdict", "by")
    grpo = Table(names, [*_grpo(known)], words=(0, 4, 5))
    tables = (table.markdown() for table in (sound, wrong, drift, grpo) if table.rows)
    return "\n\n".join(tables) + "\n"


KINDS = (NUMBERS, RANKS)


def _sound(known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, rule in known.get("sound", NONE)["rules"].items():
        gates = [rule["gates"][f"tolerance {t:g}, {k}"] for t in (0, 0.01) for k in KINDS]
        for alpha, key in ((rule["alpha"], "named"), (0.1, "named_at_0.1")):
            yield name, f"{alpha:g}", *(f"{gate[key]} of {rule['seeds']}" for gate in gates)


def _wrong(known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    rows = [(name, rule, 0.01) for name, rule in known.get("wrong", NONE)["rules"].items()]
    rows += [(name, rule, 0) for name, rule in known.get("weak", NONE)["rules"].items()]
    for name, rule, tolerance in rows:
        for kind in KINDS:
            gate = rule["gates"][f"tolerance {tolerance:g}, {kind}"]
            yield (
                f"{name}; {kind}, tolerance {tolerance:g}",
                f"{gate['named']} of {rule['seeds']}",
                _tokens(gate["median_tokens"], rule["tokens"]),
                _tokens(gate["tokens_for_nine_in_ten"], rule["tokens"]),
                gate["by"] or "–",
            )


def _tokens(count: int | None, most: int) -> str:
    return f"more than {most:,}" if count is None else f"{count:,}"


def _drift(known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, row in known.get("drift", NONE)["rules"].items():
        needed = row["extrapolated"]
        words = f"more than {row['tokens']:,}"
        if needed is not None:
            words = f"about {float(f'{needed:.2g}'):,.0f}"
        yield name, f"{row['tokens']:,}", f"{row['z']:+.1f}", row["by"], words


def _grpo(known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, run in known.get("grpo", {}).items():
        said = "from the policy" if run["ok"] else "**not from the policy**"
        by = "–" if run["ok"] else f"{run['by']} ({run['shift']:+.2f})"
        yield name, str(run["steps"]), f"{run['tokens']:,}", f"{run['p']:.2g}", said, by


def refresh() -> None:
    """Put the committed figures into the page."""
    BLOCK.write(render(json.loads(RESULTS.read_text())))
