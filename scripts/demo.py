"""The main job, start to end: Hydra heads and an EAGLE-3 head learn from conversations that
the target wrote, and are scored beside n-grams and plain decoding: on questions of the same
kind that nothing learned from, at T = 0 and T = 1, and on others that are unlike the data.

    make demo            # minutes; a first table within one
    make demo FAST=1     # the same steps with tiny budgets: its figures mean little

Each step prints its command. Stop it at any time: the same command goes on where it
stopped. Leaves chats.jsonl, features, hydra_heads and eagle3 in runs/demo, tables in
reports/demo/like and unlike; FAST=1 has folders of its own, runs/demo-fast and
reports/demo-fast.

The conversations come with the code, since writing them takes as long as the rest. What
wrote scripts/prompts/demo_chats.jsonl, and demo_questions.jsonl, whose answers nothing
reads (bfloat16 rounds otherwise on other machines, so a few rows differ there):

    outrider synthesize target=smollm2 seed=0 batch=96 num_conversations=384 \\
        max_new_tokens=200 out=demo_chats.jsonl
    outrider synthesize target=smollm2 seed=1 batch=48 num_conversations=48 \\
        max_new_tokens=8 out=demo_questions.jsonl
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.errors import Interrupted, UserError, resumable
from outrider.conf.schema import entry
from outrider.scripts.common import files
from outrider.scripts.common.config import DemoConfig
from outrider.scripts.reports import score_table
from outrider.scripts.reports.table import DOUBT, Table, number
from outrider.scripts.scoring.ranking import believable, best

CHATS, QUESTIONS = (Path(f"scripts/prompts/demo_{what}.jsonl") for what in ("chats", "questions"))
NGRAM = "ngram@chain:3"


STOPPED = (130, 75, -2, -15)  # exit codes of a command that goes on when it is given again


@dataclass(frozen=True)
class Step:
    """A script with its keys, and the file that it leaves when it is done."""

    title: str
    argv: list[str]
    leaves: Path

    @property
    def line(self) -> str:
        """The command as one types it: without a clone there are no scripts, but `outrider`."""
        if files.in_clone():
            return shlex.join(["python", *self.argv])
        script = Path(self.argv[0])
        verb = ["train", script.stem] if script.parts[0] == "train" else [script.stem]
        return shlex.join(["outrider", *verb, *self.argv[1:]])


@dataclass(frozen=True)
class Budget:
    """What the demo may spend. name: of its folders. conversations: so many of those that come
    with the code. hydra_steps, eagle_steps: of training. prompts: asked like the data, half as
    many unlike it. tokens: of an answer."""

    name: str
    conversations: int
    hydra_steps: int
    eagle_steps: int
    prompts: int
    tokens: int

    @property
    def runs(self) -> Path:
        return Path("runs") / self.name

    @property
    def reports(self) -> Path:
        return Path("reports") / self.name

    def rows(self) -> dict[str, tuple[str, str]]:
        """Return drafters of the tables: (what they are to a reader, kind of head), by
        their names. Short drafts: a drafted token costs 6 to 12 % of a plain pass, a
        seventh on a processor without bfloat16. scripts/tune.py finds the best size for a
        head and a machine."""
        hydra = f"{self.runs}/hydra_heads@chain:2"
        return {
            NGRAM: ("n-grams, untrained", "ngram"),
            f"{self.runs}/eagle3@chain:2": ("EAGLE-3 head", "eagle3"),
            hydra: ("Hydra heads", "hydra_heads"),
            f"{hydra}+{NGRAM}": ("Hydra heads and n-grams", "hydra_heads"),
        }


FULL = Budget("demo", 384, hydra_steps=180, eagle_steps=180, prompts=24, tokens=48)
# Where a processor has no instructions for bfloat16: a float32 step takes it three times as long.
HALF = replace(FULL, conversations=192, hydra_steps=100, eagle_steps=90, prompts=12, tokens=36)
FAST = Budget("demo-fast", 32, hydra_steps=10, eagle_steps=10, prompts=8, tokens=24)


def steps(budget: Budget) -> list[Step]:
    """Return the main job as commands."""
    runs, reports = budget.runs, budget.reports
    chats, features = runs / "chats.jsonl", runs / "features"
    text = ["target=smollm2", "data=jsonl", f"data.path={chats}", "data.max_length=320"]
    read = features / "manifest.json"

    def train(title: str, script: str, name: str, updates: int, keys: list[str]) -> Step:
        words = [
            script,
            *text,
            f"data.features={features}",
            f"out_dir={runs}/{name}",
            f"steps={updates}",
            "batch_size=8",
            "head.draft_vocab=3072",
            "optim.lr=2e-3",  # twice the usual: so short a run learns more
            *keys,
            "eval.every=0",  # the tables that follow decode
            "eval.parity=2",
        ]
        return Step(title, words, runs / name / "head" / "head.json")

    def score(title: str, name: str, rows: list[str], keys: list[str]) -> Step:
        words = ["scripts/evaluate.py", "target=smollm2", f"drafters=[{','.join(rows)}]"]
        words += [f"out={reports}/{name}", "overwrite=true", "parity=0", *keys]
        return Step(title, words, reports / name / "report.json")

    store = ["scripts/cache_features.py", *text, "heads=[hydra_heads,eagle3]", f"out={features}"]
    hydra = "Hydra heads learn, the head that learns most in a minute"
    eagle = "an EAGLE-3 head learns, which other engines load"
    # As many levels as are drafted; without the norms of EAGLE-3.1, for every engine.
    eagle_keys = ["head=eagle3", "head.steps=2", "head.depth=2"]
    heads = [
        train(hydra, "train/hydra_heads.py", "hydra_heads", budget.hydra_steps, ["head.heads=2"]),
        train(eagle, "train/eagle.py", "eagle3", budget.eagle_steps, eagle_keys),
    ]
    rows = ["none", *budget.rows()]
    few, length = ["num_prompts=6", "max_new_tokens=32"], f"max_new_tokens={budget.tokens}"
    both = [f"prompts={QUESTIONS}", f"num_prompts={budget.prompts}", "temperatures=[0,1]", length]
    half = [f"num_prompts={budget.prompts // 2}", length]
    return [
        score("n-grams, which need no training", "first", ["none", NGRAM], few),
        Step("the target reads its conversations, once for both heads", store, read),
        *heads,
        score("scores on questions like the data", "like", rows, both),
        score("scores on questions unlike the data", "unlike", rows, half),
    ]


@entry("demo", DemoConfig)
@resumable()
def main(cfg: DemoConfig) -> int:
    """Run the steps that are not done yet."""
    if files.in_clone():  # an installed package is no place to write to
        os.chdir(files.ROOT)
    budget = FAST if cfg.fast else budget_here()
    began = time.perf_counter()
    with files.sole_folder(budget.runs):
        begin(budget)
        run(steps(budget))
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")
    tables = [budget.reports / name for name in ("like", "unlike")]
    like, unlike = (json.loads((table / "report.json").read_text()) for table in tables)
    what_it_brought(budget, like, unlike).show()
    print("open", *(table / "report.html" for table in tables))
    # Not by rich, which would take [..] for its own.
    print("go on with", *next_commands(budget, like), sep="\n")
    return 0


def budget_here() -> Budget:
    """Return the budget of this machine, whose minutes are few in either case."""
    from outrider.decode.models.arithmetic import dtype_on  # slow to import

    if dtype_on(None) == "bfloat16":
        return FULL
    print(
        "note: no instructions for bfloat16 here: half of the data and of the questions, in float32"
    )
    return HALF


def begin(budget: Budget) -> None:
    """Put the conversations where they are trained on. Raises UserError where another
    version of the demo, which had other figures, has left its files."""
    figures = budget.runs / "budget.json"
    made = json.loads(figures.read_text()) if figures.exists() else None
    if made != asdict(budget) and any(budget.runs.glob("*/")):
        raise UserError(
            f"{budget.runs}: of another version of the demo, which this one cannot go on with; "
            f"rename or remove it and {budget.reports}"
        )
    files.write_json(figures, asdict(budget))
    lines = files.here(CHATS).read_text().splitlines(keepends=True)[: budget.conversations]
    files.write_text(budget.runs / "chats.jsonl", "".join(lines))


def run(todo: list[Step]) -> None:
    """Run the steps that are not done yet, as the user would. Raises UserError where one fails (its
    own messages have said why), and Interrupted where it was stopped."""
    for place, step in enumerate(todo, 1):
        if step.leaves.exists():
            print(f"{place}. {step.title}: done already ({step.leaves})", flush=True)
            continue
        print(f"{place}. {step.title}\n   {step.line}", flush=True)
        script = files.here(Path(step.argv[0]))  # a job may run from any folder
        process = subprocess.Popen([sys.executable, str(script), *step.argv[1:]])
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # it saves what it has
            process.wait()
            raise
        if code in STOPPED:
            raise Interrupted("demo: stopped; the same command goes on from here")
        if code or not step.leaves.exists():
            raise UserError(
                f"demo: `{step.line}` ended with exit code {code}; see its message above"
            )


def what_it_brought(budget: Budget, like: dict[str, Any], unlike: dict[str, Any]) -> Table:
    """Return the last screen, from the reports on questions like the data and unlike them:
    n-grams, which learned nothing, and the trained heads, alone and with them."""
    from outrider.heads.interop.engines import LLAMACPP, SGLANG, VLLM  # slow to import

    settings = {"T = 0": like, "T = 1": like["others"][0], "unlike its data, T = 0": unlike}
    found = [{row["name"]: row for row in report["drafters"]} for report in settings.values()]
    rows = []
    for name, (title, kind) in budget.rows().items():
        cells = [
            f"{number(row[name]['accepted_length']['mean'])} · {score_table.speed(row[name])}"
            for row in found
        ]
        engines = [engine.name for engine in (VLLM, SGLANG, LLAMACPP) if engine.loads(kind)]
        rows.append([title, *cells, ", ".join(engines) or "Outrider alone"])
    fastest = best(like["drafters"])
    pays = fastest is not None and fastest["speedup"]["mean"] > 1
    marked = list(budget.rows()).index(fastest["name"]) if fastest and pays else None
    head = ("drafter", *settings, "loaded by")
    notes = ["tokens a pass · speed, where plain decoding has 1 of both"]
    if not pays:
        notes.append("NOT faster than plain decoding on this machine at T = 0: no row")
    if any(cell.endswith(DOUBT) for row in rows for cell in row):
        notes.append(f"IN DOUBT {DOUBT}: the notes of the table above say why")
    if budget is FAST:
        notes.append("NOT what the heads can do: FAST=1 checks that all steps run")
    return Table(head, rows, "what training brought", notes, words=(0, -1), best=marked)


def next_commands(budget: Budget, report: dict[str, Any]) -> list[str]:
    """Return chat, page and export, as one types them: the first two with the fastest row
    of `report` that has a head of ours and whose speed can be believed, the last with the
    head that other engines load."""
    trained = [
        row["name"] for row in believable(report["drafters"]) if row["name"].startswith("runs/")
    ]
    drafter = trained[0] if trained else f"{budget.runs}/eagle3"
    command = "outrider" if shutil.which("outrider") else ".venv/bin/outrider"
    export = [f"drafter={budget.runs}/eagle3", "format=vllm", f"out=exports/{budget.name}"]
    lines = [
        ["chat", "target=smollm2", f"drafter={drafter}"],
        ["serve", "target=smollm2", f"drafters=[{drafter}]"],
        ["export", "target=smollm2", *export],
    ]
    return [f"  {command} {shlex.join(words)}" for words in lines]


if __name__ == "__main__":
    main()
