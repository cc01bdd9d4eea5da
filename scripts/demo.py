"""The main job, start to end: the target writes its own data, Hydra heads and an EAGLE-3 head
learn from it, all are scored: on questions of the same kind that nothing learned from, at T = 0
and T = 1, and on others that are unlike the data.

    make demo            # some 55 minutes of one CPU core
    # the same steps with tiny budgets, a few minutes; the figures mean little
    make demo FAST=1
    make demo BLOCK=1    # a DSpark head as well, with or without FAST=1

Each step prints its command. Stop it at any time: the same command goes on where it stopped,
and a finished step is not done again. Leaves data.jsonl, questions.jsonl, features (1 GB),
hydra_heads and eagle3 in runs/demo, reports/demo/t0, t1 and unlike, and in
reports/demo/spent.json where the time went. The work of the other budget is kept aside in
runs/demo-full or runs/demo-fast and comes back with it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from outrider.scripts.reports.table import Table, interval, number

RUNS, REPORTS = Path("runs/demo"), Path("reports/demo")
# Short drafts: a drafted token costs 6 to 12 % of a plain pass, and on a processor without
# bfloat16 the seventh of a pass a step more. scripts/tune.py finds the best size for a head and a
# machine.
HYDRA_HEADS, EAGLE = f"{RUNS}/hydra_heads@chain", f"{RUNS}/eagle3@chain"
NGRAM = "ngram@3"
UNION = f"{HYDRA_HEADS}:2+{NGRAM}"
BLOCK = f"{RUNS}/dspark@chain:2"


@dataclass(frozen=True)
class DemoBudget:
    """What the demo may spend."""

    conversations: int
    answer_tokens: int
    draft_vocab: int
    steps: int
    eagle_steps: int
    block_steps: int
    batch: int
    prompts: int
    tokens: int


FULL = DemoBudget(
    conversations=384,
    answer_tokens=200,
    draft_vocab=3072,
    steps=130,
    eagle_steps=140,
    block_steps=280,
    batch=16,
    prompts=48,
    tokens=48,
)
FAST = DemoBudget(
    conversations=32,
    answer_tokens=64,
    draft_vocab=384,
    steps=20,
    eagle_steps=10,
    block_steps=10,
    batch=8,
    prompts=8,
    tokens=24,
)


DATA, QUESTIONS, FEATURES = RUNS / "data.jsonl", RUNS / "questions.jsonl", RUNS / "features"
TEXT = ["target=smollm2", "data=jsonl", f"data.path={DATA}", "data.max_length=320"]


def steps(budget: DemoBudget, fast: bool, block: bool = False) -> list[Command]:
    """The main job as commands."""

    def synthesize(out: Path, seed: int, count: int, tokens: int) -> list[str]:
        return [
            "scripts/synthesize.py",
            "target=smollm2",
            f"out={out}",
            f"seed={seed}",
            f"batch={min(count, 96)}",
            f"num_conversations={count}",
            f"max_new_tokens={tokens}",
        ]

    # Something to see before the long steps.
    few = ["num_prompts=6", "max_new_tokens=32"]
    first = score("n-grams, which need no training, race", "first", ["none", NGRAM], few)
    data = synthesize(DATA, 0, budget.conversations, budget.answer_tokens)
    # Their answers are of no use: every drafter is asked for its own.
    questions = synthesize(QUESTIONS, 1, budget.prompts, 8)
    # All heads see every conversation some five times: the target reads it once for all of them.
    store = [
        "scripts/cache_features.py",
        *TEXT,
        "heads=[hydra_heads,eagle3,dspark]",
        f"out={FEATURES}",
    ]
    runs = trainings(budget, fast)
    if not block:
        del runs["dspark"]
    written = FEATURES / "manifest.json"
    heads = {name: RUNS / name / "head" / "head.json" for name in runs}
    return [
        first,
        Command("the target writes conversations", data, [], DATA),
        Command("the target asks questions that nothing learns from", questions, [], QUESTIONS),
        Command("the target reads them, once for all heads", store, [DATA], written),
        *(
            Command(f"{title} from them", args, [written], heads[name])
            for name, (title, args) in runs.items()
        ),
        *scores(budget, block, list(heads.values())),
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
    eagle3 = ["head=eagle3", "head.steps=2", "head.depth=2"]
    return {
        # Of all heads those that learn most in so few minutes; no other engine loads them.
        "hydra_heads": (
            "Hydra heads learn",
            train("hydra_heads", "train/hydra_heads.py", budget.steps, "head.heads=2"),
        ),
        "eagle3": (
            "an EAGLE-3 head learns",
            # Two levels, for so many are drafted. Without the norms of EAGLE-3.1: every engine
            # serves it, and they bring 3 %.
            train("eagle3", "train/eagle.py", budget.eagle_steps, *eagle3),
        ),
        "dspark": (
            "a DSpark head learns",
            train("dspark", "train/block.py", budget.block_steps, *dspark),
        ),
    }


def scores(budget: DemoBudget, block: bool, heads: list[Path]) -> list[Command]:
    """Drafters side by side: on questions like the data at both temperatures, and on others."""
    more = [BLOCK] if block else []
    at_zero = ["none", NGRAM, f"{HYDRA_HEADS}:2", f"{EAGLE}:2", UNION, *more]
    # Drafts are shorter where tokens are sampled: fewer of them are accepted.
    short = [f"{HYDRA_HEADS}:1", f"{EAGLE}:1"]
    at_one = ["none", NGRAM, *short, f"{HYDRA_HEADS}:1+{NGRAM}", *more]

    like = f"prompts={QUESTIONS}"
    few = f"num_prompts={budget.prompts // 2}"
    tables = [
        ("scores on questions unlike the data", "unlike", at_zero, [few, "parity=0"]),
        ("scores at T = 1", "t1", at_one, [like, "temperature=1", few, "parity=0"]),
        ("scores at T = 0", "t0", at_zero, [like, "temperature=0", "parity=2"]),
    ]
    return [
        score(title, name, drafters, [f"max_new_tokens={budget.tokens}", *keys], heads)
        for title, name, drafters, keys in tables
    ]


def score(
    title: str, name: str, drafters: list[str], keys: list[str], heads: Sequence[Path] = ()
) -> Command:
    """A table of drafters, in a folder of that name."""
    words = ["scripts/evaluate.py", "target=smollm2", f"drafters=[{','.join(drafters)}]"]
    words += [f"out={REPORTS}/{name}", *keys]
    reads = [*heads, QUESTIONS] if heads else []
    return Command(title, words, reads, REPORTS / name / "report.json")


@entry("demo", DemoConfig)
def main(cfg: DemoConfig) -> int:
    """Run the steps that are not done yet."""
    if files.in_clone():  # an installed package is no place to write to
        os.chdir(files.ROOT)
    console = Console()
    started = time.perf_counter()
    budget = FAST if cfg.fast else FULL
    todo = steps(budget, cfg.fast, cfg.block)
    with files.sole_folder(RUNS):
        swap("fast" if cfg.fast else "full", budget)
        job = Pipeline("demo", RUNS)
        job.run(todo, again)
        where_it_went(job, todo).show()
    pages = [str(step.leaves.with_name("report.html")) for step in todo[1:] if scored(step)]
    spent = f"{time.perf_counter() - started:.0f} s"
    console.print(f"open {', '.join(pages)}   ({spent})", highlight=False, soft_wrap=True)
    report, other = (
        json.loads((REPORTS / name / "report.json").read_text()) for name in ("t0", "unlike")
    )
    what_it_brought(report, other).show()
    # Not by rich, which would take [..] for its own.
    print("go on with", *next_commands(report), sep="\n")
    return 0


def what_it_brought(like: dict[str, Any], unlike: dict[str, Any]) -> Table:
    """The last screen: n-grams, which learned nothing, beside the trained heads, alone and with
    them, of the reports on questions like the data and on others."""
    shown = {
        NGRAM: "n-grams, untrained",
        f"{EAGLE}:2": "EAGLE-3 head",
        f"{HYDRA_HEADS}:2": "Hydra heads",
        UNION: "Hydra heads and n-grams",
    }
    rows = []
    for what, report in (("like its data", like), ("unlike it", unlike)):
        found = {row["name"]: row for row in report["drafters"]}
        cells = [
            f"{number(found[name]['accepted_length']['mean'])} · "
            f"{interval(found[name]['speedup'], 2, '×')}"
            for name in shown
        ]
        rows.append([what, *cells])
    header = ("questions", *shown.values())
    notes = [
        "tokens a pass, where plain decoding has 1, and its speed in plain decoding's; T = 0",
        "EAGLE-3 is what other engines load; Hydra heads learn more in so few minutes",
    ]
    return Table(header, rows, "what training brought", notes)


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


def scored(command: Command) -> bool:
    """Whether a command leaves a table of drafters."""
    return command.leaves.name == "report.json"


def again(command: Command) -> None:
    """Show the scores that an earlier run has left: a command that runs prints its own."""
    if scored(command):
        score_table.table(json.loads(command.leaves.read_text())).show()


def where_it_went(job: Pipeline, todo: list[Command]) -> Table:
    """The seconds of every step, done now or before, also in spent.json."""
    spent = {step.title: job.spent(step) for step in todo}
    lines = {step.title: {"command": step.line, **spent[step.title]} for step in todo}
    about = {"command": files.command(), "environment": files.environment("cpu")}
    files.write_json(REPORTS / "spent.json", {**about, "steps": lines})
    rows, keys = [], ("seconds", "cpu_seconds")
    everything: dict[str, float] = {key: sum(row[key] for row in spent.values()) for key in keys}
    everything["peak_bytes"] = max(row["peak_bytes"] for row in spent.values())
    spent["all"] = everything
    whole = spent["all"]["cpu_seconds"]
    for title, row in spent.items():
        seconds, cpu = (row[key] for key in keys)
        share = f"{cpu / whole:.0%}" if whole else "–"
        memory = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "–"
        rows.append([title, f"{seconds:.0f}", f"{cpu:.0f}", share, memory])
    head = ("where the time went", "seconds", "of the processors", "share", "largest, GiB")
    notes = [
        "largest: of this step and of those before it in the same sitting, the largest process"
    ]
    return Table(head, rows, notes=notes)


def swap(name: str, budget: DemoBudget) -> None:
    """Make runs/demo and reports/demo those of the budget `name`; the other budget's are set
    aside, and so is what a demo with other figures left under this name: its files could not be
    gone on with."""
    mark, figures = RUNS / "budget", RUNS / "budget.json"
    old = mark.read_text().strip() if mark.exists() else name
    if old != name:
        move(f"-{old}")
        for folder in (RUNS, REPORTS):
            if (aside := Path(f"{folder}-{name}")).exists():
                aside.rename(folder)
    made = json.loads(figures.read_text()) if figures.exists() else None
    if (RUNS / "steps").exists() and made != asdict(budget):
        kept = move(f"-{name}-before")
        print(f"note: {RUNS} is of an earlier demo; set aside as {kept}")
    files.write_json(figures, asdict(budget))
    files.write_text(mark, name + "\n")


def move(ending: str) -> str:
    """Rename runs/demo and reports/demo, with a number behind `ending` where that is taken. What
    runs/demo is called now."""
    endings = (ending, *(f"{ending}-{number}" for number in range(1, 10**6)))
    both = (RUNS, REPORTS)
    free = next(e for e in endings if not any(Path(f"{folder}{e}").exists() for folder in both))
    for folder in both:
        if folder.exists():
            folder.rename(f"{folder}{free}")
    return f"{RUNS}{free}"


if __name__ == "__main__":
    main()
