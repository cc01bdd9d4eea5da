"""The main job, start to end: the target writes its own data, Medusa heads and an EAGLE-3 head
learn from it, all are scored.

    make demo            # some 25 minutes of one CPU core
    # the same steps with tiny budgets, a few minutes; the figures mean little
    make demo FAST=1
    make demo BLOCK=1    # a DSpark head as well, with or without FAST=1

Each step prints its command. Stop it at any time: the same command goes on where it stopped,
and a finished step is not done again. Leaves data.jsonl, features (0.4 GB), medusa and eagle3 in
runs/demo, reports/demo/t0 and reports/demo/t1, and in reports/demo/spent.json where the time
went. The work of the other budget is kept aside in runs/demo-full or runs/demo-fast and comes
back with it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.config import DemoConfig
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.reports import score_table
from outrider.scripts.reports.table import Table

RUNS, REPORTS = Path("runs/demo"), Path("reports/demo")
# Short drafts: on packed weights a node costs some 6 % of a plain pass. scripts/tune.py finds the
# best size for a head and a machine.
DRAFTERS = [
    "none",
    "ngram",
    f"{RUNS}/medusa@chain:2",
    f"{RUNS}/medusa@tree:4",
    f"{RUNS}/eagle3@chain:2",
    f"{RUNS}/eagle3@tree:4",
    f"{RUNS}/eagle3@chain:2+ngram",
]
BLOCK = f"{RUNS}/dspark@chain:2"


@dataclass(frozen=True)
class DemoBudget:
    """What the demo may spend."""

    conversations: int
    answer_tokens: int
    draft_vocab: int
    steps: int
    eagle_steps: int
    batch: int
    prompts: int
    tokens: int


FULL = DemoBudget(
    conversations=288,
    answer_tokens=200,
    draft_vocab=3072,
    steps=240,
    eagle_steps=200,
    batch=16,
    prompts=24,
    tokens=64,
)
FAST = DemoBudget(
    conversations=32,
    answer_tokens=64,
    draft_vocab=384,
    steps=20,
    eagle_steps=10,
    batch=8,
    prompts=8,
    tokens=24,
)


DATA, FEATURES = RUNS / "data.jsonl", RUNS / "features"
TEXT = ["target=smollm2", "data=jsonl", f"data.path={DATA}", "data.max_length=320"]


def steps(budget: DemoBudget, fast: bool, block: bool = False) -> list[Command]:
    """The main job as commands."""
    synthesize = [
        "scripts/synthesize.py",
        "target=smollm2",
        f"out={DATA}",
        "seed=0",
        f"batch={min(budget.conversations, 96)}",
        f"num_conversations={budget.conversations}",
        f"max_new_tokens={budget.answer_tokens}",
    ]
    # All heads see every conversation some ten times: the target reads it once for all of them.
    store = [
        "scripts/cache_features.py",
        *TEXT,
        "heads=[medusa,eagle3,dspark]",
        f"out={FEATURES}",
    ]
    runs = trainings(budget, fast)
    if not block:
        del runs["dspark"]
    written = FEATURES / "manifest.json"
    heads = {name: RUNS / name / "head" / "head.json" for name in runs}
    return [
        Command("the target writes conversations", synthesize, [], DATA),
        Command("the target reads them, once for all heads", store, [DATA], written),
        *(
            Command(f"{title} from them", args, [written], heads[name])
            for name, (title, args) in runs.items()
        ),
        *(scoring(budget, temperature, block, list(heads.values())) for temperature in (0, 1)),
    ]


def trainings(budget: DemoBudget, fast: bool) -> dict[str, tuple[str, list[str]]]:
    """(title, command) of every head's training, by its name."""

    def train(name: str, script: str, updates: int, *more: str) -> list[str]:
        return [
            script,
            *TEXT,
            f"data.features={FEATURES}",
            f"out_dir={RUNS}/{name}",
            "seed=0",
            f"steps={updates}",
            f"batch_size={budget.batch}",
            f"head.draft_vocab={budget.draft_vocab}",
            *more,
            f"save_every={max(updates // 3, 10)}",
            f"eval.every={updates}",  # once, at the end: a decode costs as much as ten steps
            f"eval.prompts={2 if fast else 6}",
            f"eval.max_new_tokens={16 if fast else 48}",
            f"eval.parity={2 if fast else 4}",
        ]

    # Short blocks: at these budgets later slots are hardly ever accepted.
    dspark = ["head=dspark", "head.block=3"]
    return {
        "medusa": ("Medusa heads learn", train("medusa", "train/medusa.py", budget.steps)),
        "eagle3": (
            "an EAGLE-3 head learns",
            # Without the norms of EAGLE-3.1: every engine serves it, and they bring 3 %.
            train("eagle3", "train/eagle.py", budget.eagle_steps, "head=eagle3"),
        ),
        "dspark": (
            "a DSpark head learns",
            train("dspark", "train/block.py", budget.eagle_steps, *dspark),
        ),
    }


def scoring(budget: DemoBudget, temperature: int, block: bool, heads: list[Path]) -> Command:
    """All drafters side by side at a temperature."""
    out = REPORTS / f"t{temperature}"
    drafters = [d for d in DRAFTERS if temperature == 0 or not d.endswith("@chain:2")]
    drafters += [BLOCK] if block else []
    score = [
        "scripts/evaluate.py",
        "target=smollm2",
        f"drafters=[{','.join(drafters)}]",
        f"out={out}",
        f"temperature={temperature}",
        f"num_prompts={budget.prompts * 2 // 3 if temperature else budget.prompts}",
        f"max_new_tokens={budget.tokens}",
        f"parity={0 if temperature else 2}",
    ]
    return Command(f"scores at T = {temperature}", score, heads, out / "report.json")


@entry("demo", DemoConfig)
def main(cfg: DemoConfig) -> int:
    """Run the steps that are not done yet."""
    if files.in_clone():  # an installed package is no place to write to
        os.chdir(files.ROOT)
    console = Console()
    started = time.perf_counter()
    todo = steps(FAST if cfg.fast else FULL, cfg.fast, cfg.block)
    with files.sole_folder(RUNS):
        swap("fast" if cfg.fast else "full")
        job = Pipeline("demo", RUNS)
        job.run(todo, again)
        where_it_went(job, todo).show()
    console.print(
        f"open {REPORTS}/t0/report.html and {REPORTS}/t1/report.html   "
        f"({time.perf_counter() - started:.0f} s)",
        highlight=False,
    )
    report = json.loads((REPORTS / "t0" / "report.json").read_text())
    # Not by rich, which would take [..] for its own.
    print("go on with", *next_commands(report), sep="\n")
    return 0


def next_commands(report: dict[str, Any]) -> list[str]:
    """Chat, page and export of the fastest row of `report` that has a head of ours, as one types
    them: the export takes the EAGLE-3 head, which every engine serves."""
    trained = [row for row in report["drafters"] if str(row["name"]).startswith(f"{RUNS}/")]
    best = max(trained, key=lambda row: row["speedup"]["mean"])["name"]
    command = "outrider" if shutil.which("outrider") else ".venv/bin/outrider"
    lines = [
        ["chat", "target=smollm2", f"drafter={best}"],
        ["serve", "target=smollm2", f"drafters=[{best}]"],
        ["export", "target=smollm2", f"drafter={RUNS}/eagle3", "format=vllm", "out=exports/demo"],
    ]
    return [f"  {command} {shlex.join(words)}" for words in lines]


def again(command: Command) -> None:
    """Show the scores that an earlier run has left: a command that runs prints its own."""
    if command.leaves.name == "report.json":
        score_table.table(json.loads(command.leaves.read_text())).show()


def where_it_went(job: Pipeline, todo: list[Command]) -> Table:
    """The seconds of every step, done now or before, also in spent.json."""
    spent = {step.title: job.spent(step) for step in todo}
    lines = {step.title: {"command": step.line, **spent[step.title]} for step in todo}
    about = {"command": files.command(), "environment": files.environment("cpu")}
    files.write_json(REPORTS / "spent.json", {**about, "steps": lines})
    rows, keys = [], ("seconds", "cpu_seconds")
    spent["all"] = {key: sum(row[key] for row in spent.values()) for key in keys}
    whole = spent["all"]["cpu_seconds"]
    for title, row in spent.items():
        seconds, cpu = (row[key] for key in keys)
        share = f"{cpu / whole:.0%}" if whole else "–"
        rows.append([title, f"{seconds:.0f}", f"{cpu:.0f}", share])
    return Table(("where the time went", "seconds", "of the processors", "share"), rows)


def swap(budget: str) -> None:
    """Make runs/demo and reports/demo those of `budget`; the other budget's are set aside."""
    mark = RUNS / "budget"
    old = mark.read_text().strip() if mark.exists() else budget
    if old != budget:
        for folder in (RUNS, REPORTS):
            if folder.exists():
                folder.rename(f"{folder}-{old}")
            if (aside := Path(f"{folder}-{budget}")).exists():
                aside.rename(folder)
    files.write_text(mark, budget + "\n")


if __name__ == "__main__":
    main()
