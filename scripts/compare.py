"""Check that a scoreboard can be believed: two runs of it agree, and its ranking does not hang
on ten prompts.

    python scripts/compare.py first=reports/monday second=reports/tuesday
    python scripts/compare.py first=reports/monday change=10 out=reports/monday/stability.json

Both are folders that evaluate.py wrote (or their report.json), of the same target, prompts and
settings. Row by row the 95 % intervals of accepted length, tokens/s and speedup must overlap;
and whoever a report calls faster must stay faster when prompts are left out or counted twice
at random. Nothing is decoded again.

Exit codes: 0 both hold; 1 one does not; 2 a mistake to mend.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from conf.errors import UserError
from conf.schema import entry
from scripts.common import files
from scripts.reports.table import interval
from scripts.scoring import consistency


@dataclass
class CompareConfig:
    """Keys of scripts/compare.py."""

    # a folder that evaluate.py wrote, or its report.json
    first: str
    # another run of the same scoreboard; null = look at the ranking of the first alone
    second: str | None = None
    # so many prompts fewer, and so many counted twice, must not change the ranking that is
    # claimed
    change: int = 10
    # how often prompts are drawn
    draws: int = 200
    # of the draws
    seed: int = 0
    # JSON file for everything that was found; null = none
    out: str | None = None

    def validate(self) -> list[str]:
        return [
            f"{key}: {getattr(self, key)} is below 1; set 1 or more"
            for key in ("change", "draws")
            if getattr(self, key) < 1
        ]


@entry("compare", CompareConfig)
def main(cfg: CompareConfig) -> int:
    """Read, compare, tell. Exit code 1 when a statement does not hold."""
    console = Console() if sys.stdout.isatty() else Console(width=140)
    places = [cfg.first] if cfg.second is None else [cfg.first, cfg.second]
    reports = [consistency.read(place) for place in places]
    found: dict[str, Any] = {"format": 1, "command": files.command(), "reports": places}
    if len(reports) == 2:
        apart = consistency.differences(*reports)
        if apart:
            raise UserError(
                f"second: another scoreboard than the first ({'; '.join(apart)}); score both alike"
            )
        found["agreement"] = consistency.agreement(*reports)
    found["ranking"] = [consistency.stability(r, cfg.change, cfg.draws, cfg.seed) for r in reports]
    if "agreement" in found:
        _show_agreement(found["agreement"], console)
    for place, report, told in zip(places, reports, found["ranking"], strict=True):
        _show_ranking(place, report, told, console)
    found["holds"] = all(r["stable"] for r in found["ranking"]) and found.get("agreement", {}).get(
        "agrees", True
    )
    busy = [
        p
        for p, r in zip(places, reports, strict=True)
        if not r.get("plain_pass_ms", {}).get("steady", True)
    ]
    if busy:
        console.print(
            f"measured on a machine that was busy with other work: {', '.join(busy)}",
            highlight=False,
        )
    if cfg.out:
        files.write_json(Path(cfg.out), found)
        console.print(f"written: {cfg.out}", highlight=False)
    return 0 if found["holds"] else 1


def _show_agreement(found: dict[str, Any], console: Console) -> None:
    table = Table(
        title="two runs, row by row", title_justify="left", title_style="bold", header_style="bold"
    )
    table.add_column("drafter")
    for words in consistency.METRICS.values():
        table.add_column(words, justify="right")
        table.add_column("change", justify="right")
    table.add_column("agree", justify="right")
    for row in found["rows"]:
        cells = []
        for cell in row["metrics"].values():
            cells.append(f"{interval(cell['a'])} · {interval(cell['b'])}")
            cells.append("–" if cell["change"] is None else f"{cell['change']:+.1%}")
        table.add_row(row["label"], *cells, {True: "yes", False: "NO", None: "open"}[row["agrees"]])
    console.print(table)
    if found["only_in_one"]:
        console.print(f"in one report only: {', '.join(found['only_in_one'])}", highlight=False)
    console.print(
        "the intervals of every row overlap" if found["agrees"] else "NOT ALL ROWS AGREE",
        style="bold",
    )


def _show_ranking(
    place: str, report: dict[str, Any], found: dict[str, Any], console: Console
) -> None:
    label = {row["name"]: row["label"] for row in report["drafters"]}
    console.print(
        f"{place}: {len(found['claims'])} claims of the form `a is faster than b`, "
        f"{found['change']} of "
        f"{found['prompts']} prompts fewer or more, {found['draws']} draws",
        highlight=False,
    )
    for row in found["claims"]:
        least = {k: min(row[kind][k] for kind in ("fewer", "more")) for k in ("kept", "claimed")}
        if not row["stable"] or least["claimed"] < 1:
            console.print(
                f"  {label[row['faster']]} over {label[row['slower']]}: still faster in "
                f"{least['kept']:.1%}, "
                f"still claimed in {least['claimed']:.1%} of the draws",
                highlight=False,
            )
    console.print(
        "no draw turns a claim round" if found["stable"] else "A CLAIM IS TURNED ROUND",
        style="bold",
    )


if __name__ == "__main__":
    main()
