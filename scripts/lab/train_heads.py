"""Train one head of every recipe on the same conversations, for the tables that compare them.

    make heads                                  # self-written conversations, smollm2
    make heads DATA=conversations.jsonl         # shared ones
    python scripts/lab/train_heads.py path=conversations.jsonl flops=2e14 out=runs/heads \\
        prompts=unseen.jsonl

With `flops` every head gets as many steps as cost so much arithmetic beyond the target's own;
else all get `steps`. The target reads the conversations once, for all heads (OUT/features). Each
step prints its command; stop it at any time: the same command goes on where it stopped, and a
head that is done is not trained again. Leaves OUT/NAME for every recipe and OUT/heads.json: the
conversations' sha256, steps and FLOPs of every head. With `prompts` every head is then scored as
a chain and as a tree, at T = 0 and at T = 1 (OUT/t0, OUT/t1), and OUT/matched.json joins what it
cost with what it brought.

    python scripts/lab/train_heads.py path=conversations.jsonl flops=2e14 out=runs/heads \\
        heads=[eagle3,hydra_heads] seeds=[1,2] prompts=unseen.jsonl

trains them again from other seeds (OUT/NAME-seed1, ...): how much of a difference is chance?
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])


from outrider.conf.errors import UserError
from outrider.conf.recipes import RECIPES
from outrider.conf.rules import Filled, NotEmpty, NotNegative, OneOrMore, Seed, one_of
from outrider.conf.schema import compose, entry
from outrider.decode.models.identity import sha256_file
from outrider.scripts.common import files
from outrider.scripts.common.pipeline import Command, Pipeline
from outrider.scripts.common.prompts import load_prompts
from outrider.scripts.common.spelling import spelled
from outrider.scripts.evaluate import SKIPPED
from outrider.scripts.lab.pages import matched
from outrider.train.begin import measured
from outrider.train.config import ENTRIES
from outrider.train.measure.speed import draft_flops

FEW = 4  # rows of a step that are counted
READ = ("target", "data.", "dtype=", "device=")  # keys that say what is read, and how


@dataclass(frozen=True)
class HeadsConfig:
    """Keys of scripts/lab/train_heads.py."""

    # folder of the heads
    out: NotEmpty = "runs/heads"
    # conversations in JSONL; empty = the target writes OUT/data.jsonl
    path: str = ""
    # how many it writes
    conversations: OneOrMore = 600
    # recipes, in this order; empty = all
    heads: list[Annotated[str, one_of(RECIPES)]] = field(default_factory=list)
    # every recipe once more from each of these seeds
    seeds: list[Seed] = field(default_factory=list)
    # steps of every head
    steps: OneOrMore = 200
    # floating point operations of a head's training beyond the target's, in place of steps;
    # 0 = steps
    flops: NotNegative = 0.0
    # the target reads the conversations once and its features are stored (some 8 kB a token);
    # false = every head's training runs the target
    features: bool = True
    # features that an earlier run has stored, in place of OUT/features; empty = made here
    store: str = ""
    # further keys of every training command, such as target=tiny or seed=1
    more: list[str] = field(default_factory=list)
    # JSONL of prompts to score the heads on (scripts/evaluate.py); empty = they are not scored
    prompts: str = ""
    # the drafts that they are scored with
    shapes: Filled[Annotated[str, one_of(matched.SHAPES)]] = field(
        default_factory=lambda: list(matched.SHAPES)
    )
    # and the temperatures
    temperatures: Filled[Literal[0, 1]] = field(default_factory=lambda: [0, 1])
    # whether the scores tell times; false where the machine does other work beside them
    timed: bool = True
    # further keys of the scoring commands, such as num_prompts=16 or batch_size=8
    scoring: list[str] = field(default_factory=list)
    # the same for T = 1 alone
    sampling: list[str] = field(default_factory=list)

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if len(set(self.seeds)) == len(self.seeds):
            return []
        return [f"seeds: {self.seeds}; each seed trains one head; say each once"]


def read(data: Path) -> list[str]:
    """What is read by which target: the same for the features and for every head."""
    path = spelled(str(data))
    return ["target=smollm2", "data=jsonl", f"data.path={path}", "data.max_length=320"]


def features(cfg: HeadsConfig, data: Path) -> Command:
    """The target's pass over the conversations, for the heads that are asked for."""
    out = Path(cfg.out) / "features"
    kinds = sorted({RECIPES[name][0] for name in cfg.heads or RECIPES})
    args = [
        "scripts/cache_features.py",
        *read(data),
        f"heads=[{','.join(kinds)}]",
        f"out={spelled(str(out))}",
        *(key for key in cfg.more if key.startswith(READ)),
    ]
    return Command("the target reads them, once for all heads", args, [data], out / "manifest.json")


@dataclass(frozen=True)
class HeadJob:
    """A head to train. recipe: its name in RECIPES. seed: none is the one that `more` or the
    default says."""

    recipe: str
    seed: int | None = None

    @property
    def name(self) -> str:
        """Of its folder and its row."""
        return self.recipe if self.seed is None else f"{self.recipe}{matched.SEED}{self.seed}"

    @property
    def seeds(self) -> list[str]:
        """Its seed as a key of the command line."""
        return [] if self.seed is None else [f"seed={self.seed}"]


def wanted(cfg: HeadsConfig) -> list[HeadJob]:
    """Every recipe, then every recipe again from the next seed."""
    return [HeadJob(recipe, seed) for seed in (None, *cfg.seeds) for recipe in cfg.heads or RECIPES]


def keys(cfg: HeadsConfig, head: HeadJob, data: Path, steps: int) -> list[str]:
    """The command line of a head behind its script."""
    store = spelled(cfg.store or str(Path(cfg.out) / "features"))
    stored = [f"data.features={store}"] if cfg.features else []
    return [
        *read(data),
        *RECIPES[head.recipe][1],
        *stored,
        "head.draft_vocab=4096",
        "batch_size=16",
        f"out_dir={spelled(str(Path(cfg.out) / head.name))}",
        f"steps={steps}",
        "eval.every=0",
        "eval.parity=2",
        *cfg.more,
        *head.seeds,
    ]


def counted(cfg: HeadsConfig, one: HeadJob, data: Path) -> float:
    """Floating point operations of a step of a recipe beyond the target's."""
    config, schema = ENTRIES[RECIPES[one.recipe][0]]
    run_cfg: Any = compose(config, schema, keys(cfg, one, data, 1))
    _, target, head, plan = measured(replace(run_cfg, device="cpu"))
    rows = plan.rows
    few = plan.batch(0)[:: max(1, plan.batch_size // FEW)][:FEW]
    tokens = float(rows.lengths[plan.train].double().mean()) * plan.batch_size
    return tokens * draft_flops(target, head, rows.batch(few))


@entry("train_heads", HeadsConfig)
def main(cfg: HeadsConfig) -> None:
    """Run the steps that are not done yet."""
    os.chdir(files.ROOT)
    if cfg.prompts:
        load_prompts(cfg.prompts, [])  # what is not there is said before hours of training
    if cfg.store and not (Path(cfg.store) / "manifest.json").is_file():
        raise UserError(
            f"store: {cfg.store} holds no stored features (no manifest.json); name OUT/features of "
            "a run that made them, or leave it out"
        )
    out = Path(cfg.out)
    with files.sole_folder(out):
        Pipeline("heads", out).run(commands(cfg, out))
        if cfg.prompts:
            joined(cfg, out)


def commands(cfg: HeadsConfig, out: Path) -> Iterator[Command]:
    """What is run, one after the other. OUT/heads.json holds the heads that are trained so far."""
    data = Path(cfg.path).expanduser() if cfg.path else out / "data.jsonl"
    if not cfg.path:
        target = next((k for k in reversed(cfg.more) if k.startswith("target=")), "target=smollm2")
        write = ["scripts/synthesize.py", target, f"out={spelled(str(data))}", "seed=0"]
        write.append(f"num_conversations={cfg.conversations}")
        yield Command("the target writes conversations", write, [], data)
    reads = [data]
    if cfg.features and cfg.store:
        reads = [Path(cfg.store) / "manifest.json"]
    elif cfg.features:
        store = features(cfg, data)
        yield store
        reads = [store.leaves]
    found: dict[str, Any] = {"data_sha256": sha256_file(data), "heads": {}}
    flops: dict[str, float] = {}  # of a recipe's step, whatever the seed
    for head in wanted(cfg):
        if head.recipe not in flops:
            flops[head.recipe] = counted(cfg, head, data)
        each = flops[head.recipe]
        steps = max(1, round(cfg.flops / each)) if cfg.flops else cfg.steps
        argv = [f"train/{ENTRIES[RECIPES[head.recipe][0]][0]}.py", *keys(cfg, head, data, steps)]
        leaves = out / head.name / "head" / "head.json"
        yield Command(f"{head.name}, {steps} steps", argv, reads, leaves)
        found["heads"][head.name] = {"steps": steps, "flops_per_step": each, "flops": each * steps}
        files.write_json(out / "heads.json", found)
    if cfg.prompts:
        yield from (score(cfg, temperature) for temperature in cfg.temperatures)


def score(cfg: HeadsConfig, temperature: int) -> Command:
    """All heads on the same prompts, each in every shape."""
    folders = [str(Path(cfg.out) / head.name) for head in wanted(cfg)]
    shaped = [f"{folder}@{shape}" for folder in folders for shape in cfg.shapes]
    out = Path(cfg.out) / f"t{temperature}"
    args = [
        "scripts/evaluate.py",
        "target=smollm2",
        "drafters=[none]",
        f"candidates=[{','.join(map(spelled, shaped))}]",  # a shape that a head lacks is left out
        f"prompts={spelled(cfg.prompts)}",
        f"temperature={temperature}",
        "max_new_tokens=64",
        "parity=0",
        f"out={spelled(str(out))}",
        *(key for key in cfg.more if key.startswith(("target", "dtype=", "device="))),
        *cfg.scoring,
        *(cfg.sampling if temperature else []),
    ]
    reads = [Path(cfg.prompts), *(Path(folder) / "head" / "head.json" for folder in folders)]
    good = (0, SKIPPED)  # the table has a dash for what could not be scored
    return Command(f"scores at T = {temperature}", args, reads, out / "report.json", good)


def joined(cfg: HeadsConfig, out: Path) -> None:
    """The scores with what the heads cost: OUT/matched.json."""
    reports = {str(t): json.loads(score(cfg, t).leaves.read_text()) for t in cfg.temperatures}
    trained = json.loads((out / "heads.json").read_text())
    drafters = {name: str(out / name) for name in trained["heads"]}
    about = {"command": files.command(), "environment": next(iter(reports.values()))["environment"]}
    found = {**about, **matched.matched(trained, drafters, reports, cfg.timed)}
    files.write_json(out / "matched.json", found)
    print("\n\n".join(one.markdown() for one in matched.tables(found)), flush=True)


if __name__ == "__main__":
    main()
