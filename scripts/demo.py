"""Train two heads of a small model and score them, start to end, on two cores without a GPU.

Hydra heads and an EAGLE-3 head learn from conversations that the target wrote, and are scored
beside n-grams and plain decoding: on questions of the same kind that nothing learned from, at
T = 0 and T = 1, and on others that are unlike the data.

    make demo            # minutes; a first table within one
    make demo FAST=1     # the same steps with tiny budgets: its figures mean little

Each step prints its command. Stop it at any time: the same command goes on where it
stopped. Leaves chats.jsonl, features, hydra_heads and eagle3 in runs/demo, tables in
reports/demo/like and unlike, and demo.json where no step was done before; FAST=1 has
folders of its own, runs/demo-fast and reports/demo-fast.

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
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import Interrupted, UserError, resumable
from outrider.conf.schema import entry
from outrider.decode.models.arithmetic import dtype_on
from outrider.scripts.common import files
from outrider.scripts.common.config import DemoConfig

CHATS, QUESTIONS = (Path(f"scripts/prompts/demo_{what}.jsonl") for what in ("chats", "questions"))
NGRAM = "ngram@chain:3"
OUTRIDER = "from outrider.scripts.cli import main; main()"
STOPPED = (130, 75, -2, -15)  # exit codes of a command that goes on when it is given again


@dataclass(frozen=True)
class Step:
    """A command of `outrider`, and the file that it leaves when it is done."""

    title: str
    words: list[str]
    leaves: Path


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


FULL = Budget("demo", 384, hydra_steps=180, eagle_steps=180, prompts=24, tokens=48)
# Where a processor has no instructions for bfloat16: a float32 step takes it three times as long.
HALF = replace(FULL, conversations=192, hydra_steps=100, eagle_steps=90, prompts=12, tokens=36)
FAST = Budget("demo-fast", 32, hydra_steps=10, eagle_steps=10, prompts=8, tokens=24)


def steps(budget: Budget) -> list[Step]:
    """Return the main job as commands. Short drafts: a drafted token costs 6 to 12 % of a plain
    pass, a seventh on a processor without bfloat16; `outrider tune` finds the best size for a head
    and a machine. The learning rate is twice the usual: so short a run learns more."""
    runs, reports, tokens = budget.runs, budget.reports, budget.tokens
    hydra, eagle, features = runs / "hydra_heads", runs / "eagle3", runs / "features"
    text = f"target=smollm2 data.path={runs}/chats.jsonl data.max_length=320"
    learn = f"{text} data.features={features} batch_size=8 head.draft_vocab=3072 optim.lr=2e-3"
    learn += " eval.every=0 eval.parity=2"  # the tables that follow decode
    score = "evaluate target=smollm2 overwrite=true parity=0"
    rows = f"none,{NGRAM},{eagle}@chain:2,{hydra}@chain:2,{hydra}@chain:2+{NGRAM}"
    score_all = f"{score} drafters=[{rows}] max_new_tokens={tokens}"
    made = (
        (
            "n-grams, which need no training",
            f"{score} drafters=[none,{NGRAM}] num_prompts=6 max_new_tokens=32 out={reports}/first",
            reports / "first/report.json",
        ),
        (
            "the target reads its conversations, once for both heads",
            f"cache_features {text} heads=[hydra_heads,eagle3] out={features}",
            features / "manifest.json",
        ),
        (
            "Hydra heads learn, the head that learns most in a minute",
            f"train hydra_heads {learn} head.heads=2 steps={budget.hydra_steps} out_dir={hydra}",
            hydra / "head/head.json",
        ),
        (  # as many levels as are drafted
            "an EAGLE-3 head learns, which other engines load",
            f"train eagle3 {learn} head.steps=2 head.depth=2 steps={budget.eagle_steps} "
            f"out_dir={eagle}",
            eagle / "head/head.json",
        ),
        (
            "scores on questions like the data",
            f"{score_all} prompts={QUESTIONS} num_prompts={budget.prompts} temperatures=[0,1] "
            f"out={reports}/like",
            reports / "like/report.json",
        ),
        (
            "scores on questions unlike the data",
            f"{score_all} num_prompts={budget.prompts // 2} out={reports}/unlike",
            reports / "unlike/report.json",
        ),
    )
    return [Step(title, line.split(), leaves) for title, line, leaves in made]


@entry("demo", DemoConfig)
@resumable()
def main(cfg: DemoConfig) -> int:
    """Run the steps that are not done yet."""
    if (files.ROOT / "pyproject.toml").is_file():  # an installed package is no place to write to
        os.chdir(files.ROOT)
    budget = FAST if cfg.fast else FULL if dtype_on(None) == "bfloat16" else HALF
    if budget is HALF:
        print("note: no instructions for bfloat16 here: half of the data, in float32")
    with files.sole_writer(budget.runs):
        begin(budget)
        spent = run(todo := steps(budget))
        if len(spent) == len(todo):
            files.write_json(budget.reports / "demo.json", figures(budget, spent))
    print(f"{sum(step['seconds'] for step in spent.values()) / 60:.1f} minutes")
    if budget is FAST:
        print("NOT what the heads can do: FAST=1 checks that all steps run")
    print("open", *(budget.reports / name / "report.html" for name in ("like", "unlike")))
    head = f"target=smollm2 drafter={budget.runs}/eagle3"
    print(f"go on with\n  outrider chat {head}@chain:2")
    print(f"  outrider serve target=smollm2 'drafters=[{budget.runs}/eagle3@chain:2]'")
    print(f"  outrider export {head} format=vllm out=exports/{budget.name}")
    return 0


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


def run(todo: list[Step]) -> dict[str, dict[str, Any]]:
    """Run the steps that are not done yet, as the user would, and return what they took. Raises
    UserError where one fails (it has said why), and Interrupted where it was stopped."""
    spent = {}
    for place, step in enumerate(todo, 1):
        if step.leaves.exists():
            print(f"{place}. {step.title}: done already ({step.leaves})", flush=True)
            continue
        line = shlex.join(["outrider", *step.words])
        print(f"{place}. {step.title}\n   {line}", flush=True)
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", OUTRIDER, *step.words])
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # it saves what it has
            process.wait()
            raise
        if code in STOPPED:
            raise Interrupted("demo: stopped; the same command goes on from here")
        if code or not step.leaves.exists():
            raise UserError(f"demo: `{line}` ended with exit code {code}; see its message above")
        spent[step.title] = {"command": line, "seconds": time.perf_counter() - began}
    return spent


def figures(budget: Budget, spent: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what a whole run took and found, in the form of docs/results/demo.json."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = {
        "minutes": sum(step["seconds"] for step in spent.values()) / 60,
        "core_minutes": (used.ru_utime + used.ru_stime) / 60,
        "peak_bytes": used.ru_maxrss * 1024,
    }
    rows = []
    for kind in ("like", "unlike"):
        report = json.loads((budget.reports / kind / "report.json").read_text())
        for one in (report, *report["others"]):
            about = {"questions": f"{kind} its data", "temperature": one["settings"]["temperature"]}
            for row in one["drafters"][1:]:
                kept = {key: row[key] for key in ("accepted_length", "speedup", "doubts")}
                equal = {k: n for k, n in (row["lossless"] or {}).items() if k != "differences"}
                rows.append({**about, "drafter": row["name"], **kept, "lossless": equal})
    return {**files.origin(), "steps": spent, "runs": [{"all": whole, "rows": rows}]}


if __name__ == "__main__":
    main()
