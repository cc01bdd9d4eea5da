"""The closed formulas of the literature, as a table over K.

    python scripts/tune.py formula acceptance=0.7 cost=0.05

They assume one acceptance rate for every position, independence, and a verification as cheap
as a single step. Measured acceptance falls with depth and a pass over K tokens costs more than
one: `tune.py drafter=...` measures both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from annotated_types import Interval
from rich.console import Console
from rich.table import Table

from conf.rules import NotNegative, Share
from conf.schema import entry
from scripts.tuning import cost


@dataclass
class FormulaConfig:
    """Keys of `tune.py formula`."""

    # chance that a draft token is accepted, the same at every position
    acceptance: Share = 0.7
    # price of one draft token in target passes
    cost: NotNegative = 0.05
    # longest chain shown
    max_k: Annotated[int, Interval(ge=1, le=64)] = 10


@entry("formula", FormulaConfig)
def main(cfg: FormulaConfig) -> None:
    """Print the table."""
    a, c = cfg.acceptance, cfg.cost
    console, best = Console(), cost.best_k(a, c)
    title = f"acceptance {a:g}, draft cost {c:g} of a target pass"
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("K", "tokens per pass", "speedup", "acceptance needed to break even"):
        table.add_column(name, justify="right")
    for k in range(1, cfg.max_k + 1):
        needed = cost.acceptance_needed(c * k + 1, k)
        row = (
            str(k),
            f"{cost.expected_tokens(a, k):.3f}",
            f"{cost.closed_speedup(a, k, c):.3f}×",
            "–" if needed is None else f"{needed:.3f}",
        )
        table.add_row(*row, style="bold" if k == best else None)
    console.print(table)
    advice = f"K = {best}" if best else "no draft at all"
    console.print(
        f"best: {advice}. tokens per pass = (1 - a^(K+1)) / (1 - a), speedup = tokens / (c K + 1)",
        highlight=False,
    )
    console.print(cost.INDEPENDENCE, style="yellow", highlight=False)
    console.print(
        "measured curves instead: python scripts/tune.py target=... drafter=... out=DIR",
        style="dim",
        highlight=False,
    )


if __name__ == "__main__":
    main()
