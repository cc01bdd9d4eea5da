"""The main job, start to end: the target writes its own data, Medusa heads and an EAGLE-3 head
learn from it, all are scored.

    make demo            # half an hour on two CPU cores
    # the same steps with tiny budgets, a few minutes; the figures mean little
    make demo FAST=1

Each step prints its command. Stop it at any time: the same command goes on where it stopped,
and a finished step is not done again. Leaves data.jsonl, medusa and eagle3 in runs/demo, and
reports/demo/t0 and reports/demo/t1. The work of the other budget is kept aside in
runs/demo-full or runs/demo-fast and comes back with it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.markup import escape

from conf.schema import entry
from scripts.common import files
from scripts.common import steps as common
from scripts.common.steps import Step
from scripts.reports import table

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


@dataclass
class DemoConfig:
    """Keys of scripts/demo.py."""

    # tiny budgets: a check that all parts work together
    fast: bool = False


@dataclass(frozen=True)
class Budget:
    """What the demo may spend."""

    conversations: int
    answer_tokens: int
    draft_vocab: int
    steps: int
    eagle_steps: int
    batch: int
    prompts: int
    tokens: int


FULL = Budget(
    conversations=288,
    answer_tokens=200,
    draft_vocab=3072,
    steps=240,
    eagle_steps=170,
    batch=16,
    prompts=24,
    tokens=64,
)
FAST = Budget(
    conversations=32,
    answer_tokens=64,
    draft_vocab=384,
    steps=20,
    eagle_steps=10,
    batch=8,
    prompts=8,
    tokens=24,
)


def steps(budget: Budget, fast: bool) -> list[Step]:
    """The main job as commands."""
    data = RUNS / "data.jsonl"
    batch = min(budget.conversations, 96)
    synthesize = [
        "scripts/synthesize.py",
        "target=smollm2",
        f"out={data}",
        "seed=0",
        f"batch={batch}",
        f"num_conversations={budget.conversations}",
        f"max_new_tokens={budget.answer_tokens}",
    ]

    def train(name: str, script: str, updates: int, *more: str) -> list[str]:
        return [
            script,
            "target=smollm2",
            "data=jsonl",
            f"data.path={data}",
            f"out_dir={RUNS}/{name}",
            "seed=0",
            f"steps={updates}",
            f"batch_size={budget.batch}",
            "data.max_length=320",
            f"head.draft_vocab={budget.draft_vocab}",
            *more,
            f"save_every={max(updates // 3, 10)}",
            f"eval.every={max(updates // 2, 5)}",
            f"eval.prompts={2 if fast else 6}",
            f"eval.max_new_tokens={16 if fast else 48}",
            f"eval.parity={2 if fast else 4}",
        ]

    eagle = train(
        "eagle3",
        "train/eagle.py",
        budget.eagle_steps,
        "head=eagle3",
        "head.norm_before_fc=true",
        "head.norm_output=true",
    )
    heads = [RUNS / name / "head" / "head.json" for name in ("medusa", "eagle3")]
    found = [
        Step("the target writes conversations", synthesize, [], data),
        Step(
            "Medusa heads learn from them",
            train("medusa", "train/medusa.py", budget.steps),
            [data],
            heads[0],
        ),
        Step("an EAGLE-3 head learns from them", eagle, [data], heads[1]),
    ]
    for name, temperature in (("t0", 0), ("t1", 1)):
        out = REPORTS / name
        drafters = [d for d in DRAFTERS if temperature == 0 or d != f"{RUNS}/eagle3@chain:2"]
        score = [
            "scripts/evaluate.py",
            "target=smollm2",
            f"drafters=[{','.join(drafters)}]",
            f"out={out}",
            f"temperature={temperature}",
            f"num_prompts={budget.prompts}",
            f"max_new_tokens={budget.tokens}",
            f"parity={0 if temperature else 2 if fast else 4}",
        ]
        found.append(Step(f"scores at T = {temperature}", score, heads, out / "report.json"))
    return found


@entry("demo", DemoConfig)
def main(cfg: DemoConfig) -> int:
    """Run the steps that are not done yet."""
    os.chdir(files.ROOT)
    console = Console()
    started = time.perf_counter()
    swap("fast" if cfg.fast else "full")
    todo = steps(FAST if cfg.fast else FULL, cfg.fast)
    for number, step in enumerate(todo, 1):
        head = f"[bold][{number}/{len(todo)}][/bold] {step.title}"
        if done(step):
            console.print(f"{head}: done already ({step.leaves})")
            if step.leaves.name == "report.json":  # a step that runs prints its own table
                table.show(json.loads(step.leaves.read_text()), console)
            continue
        line = escape(shlex.join(step.args))
        console.print(f"{head}\n      [dim]python {line}[/dim]", highlight=False, soft_wrap=True)
        began = time.perf_counter()
        common.run(step, "demo", RUNS)
        remember(step)
        console.print(f"      {time.perf_counter() - began:.0f} s", highlight=False)
    spent = time.perf_counter() - started
    console.print(
        f"open {REPORTS}/t0/report.html and {REPORTS}/t1/report.html   ({spent:.0f} s)",
        highlight=False,
    )
    return 0


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


def done(step: Step) -> bool:
    """Whether a step need not run again."""
    return common.done(step, RUNS)


def remember(step: Step) -> None:
    """Note that a step is done."""
    common.remember(step, RUNS)


if __name__ == "__main__":
    main()
