"""How long the steps of docs/path.md take: predicted by the dry run that is its first command,
and measured with small parts by the rehearsal (docs/results/rehearsal.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.scripts.lab.rehearsing.page import BEGIN, steps
from outrider.scripts.reports.table import Table

PAPER = "A1"  # the step whose command predicts the others


def table(results: Path) -> str:
    """The block of the page; "" before the first rehearsal."""
    path = results / "rehearsal.json"
    if not path.exists():
        return ""
    rehearsed = json.loads(path.read_text())
    run = next(row["same"] for row in rehearsed["steps"] if row["step"] == PAPER)
    hours = predicted(run)
    spent: dict[str, float] = {}
    for row in rehearsed["steps"]:
        spent[row["step"]] = spent.get(row["step"], 0.0) + row["seconds"]
    rows = [
        [f"{step.number} {step.title}", hours.get(step.number, ""), _seconds(spent, step.number)]
        for step in steps()
        if step.number != BEGIN
    ]
    title = f"{run['target']} on {run['gpus']} x {run['gpu']}, predicted"
    shown = Table(("step", title, "the rehearsal, measured"), rows, words=(0, 1)).markdown()
    env = rehearsed["environment"]
    so_far = "" if rehearsed["complete"] else ", and the rehearsal was not through"
    where = f"{env['processor']}, {env['cpus']} processors, llama.cpp {_engine(rehearsed)}"
    return "\n".join(
        [
            shown,
            "",
            f"Predicted: {run['total']['hours']:.1f} hours in all, by [{PAPER}](#a1-on-paper), "
            "which says what it assumes; where the column is empty nothing was predicted. "
            f"Measured: {rehearsed['seconds'] / 60:.1f} minutes in all{so_far} ({where}, commit "
            f"`{env['commit']}`, [JSON](results/rehearsal.json)); of a command that was stopped "
            f"on the way, the last try alone.{_killed(results / 'rehearsal-killed.json')}",
        ]
    )


def _killed(path: Path) -> str:
    """How a rehearsal ended that was killed in every command; "" before the first one."""
    if not path.exists():
        return ""
    killed = json.loads(path.read_text())
    apart = killed["differences"]
    ended = f"otherwise in {len(apart)} of them" if apart else "the same"
    return (
        f" Killed once in each of its {len(killed['kills'])} commands and begun again, it ended "
        f"{ended} (commit `{killed['environment']['commit']}`, [JSON](results/{path.name}))."
    )


def predicted(run: dict[str, Any]) -> dict[str, str]:
    """Words for the steps that the dry run foretells."""
    written, total = run["synthesis"], run["total"]
    return {
        "A3": f"{total['synthesis']:.1f} hours for {written['answers']:,} answers of "
        f"{written['tokens_an_answer']:.0f} tokens",
        "A4": f"{total['start_up'] + total['training']:.1f} hours for {run['epochs']:.0f} passes, "
        f"{run['peak'] / 1e9:.0f} of {run['of'] / 1e9:.0f} GB on each",
    }


def _seconds(spent: dict[str, float], number: str) -> str:
    return f"{spent[number]:.0f} s" if number in spent else ""


def _engine(rehearsed: dict[str, Any]) -> str:
    return str(rehearsed["engine"]["xllamacpp"])
