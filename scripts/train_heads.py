"""Train one head of every recipe on the same conversations, for the tables that compare them.

    make heads                                  # self-written conversations, smollm2
    make heads DATA=conversations.jsonl         # shared ones
    python scripts/train_heads.py path=conversations.jsonl flops=2e14 out=runs/heads \\
        prompts=unseen.jsonl

With `flops` every head gets as many steps as cost so much arithmetic beyond the target's own;
else all get `steps`. The target reads the conversations once, for all heads (OUT/features). Each
step prints its command; stop it at any time: the same command goes on where it stopped, and a
head that is done is not trained again. Leaves OUT/NAME for every recipe and OUT/heads.json: the
conversations' sha256, steps and FLOPs of every head. With `prompts` every head is then scored as
a chain and as a tree, at T = 0 and at T = 1 (OUT/t0, OUT/t1), and OUT/matched.json joins what it
cost with what it brought.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from conf.rules import NotEmpty, NotNegative, OneOrMore, one_of
from conf.schema import compose, entry
from decode.models.identity import sha256_file
from decode.models.load import load_target
from scripts.common import files
from scripts.common.prompts import load_prompts
from scripts.common.steps import Step, done, remember, run
from scripts.evaluate import SKIPPED
from scripts.reports import matched
from train.config import ENTRIES
from train.facts import measured_head
from train.measure.speed import draft_flops
from train.texts.batches import Plan, hash_u63, load_rows

FEW = 4  # rows of a step that are counted
READ = ("target", "data.", "dtype=", "device=")  # keys that say what is read, and how
# Short blocks: at these budgets later slots are hardly ever accepted, and every row that a block
# has less is a block more for the first slot (docs/internals/experiments.md).
# name -> (kind of head, keys)
RECIPES: dict[str, tuple[str, list[str]]] = {
    "medusa": ("medusa", []),
    "hydra_heads": ("hydra_heads", []),
    "eagle3": (
        "eagle3",
        ["head=eagle3", "head.norm_before_fc=true", "head.norm_output=true"],
    ),
    "p_eagle": ("eagle3", ["head=p_eagle"]),
    "dflash": ("dflash", ["head=dflash", "head.block=4"]),
    "dflash_causal": ("dflash", ["head=dflash_causal", "head.block=4"]),
    "dspark": ("dspark", ["head=dspark", "head.block=3"]),
}


@dataclass
class HeadsConfig:
    """Keys of scripts/train_heads.py."""

    # folder of the heads
    out: NotEmpty = "runs/heads"
    # conversations in JSONL; empty = the target writes OUT/data.jsonl
    path: str = ""
    # how many it writes
    conversations: OneOrMore = 600
    # recipes, in this order; empty = all
    heads: list[Annotated[str, one_of(RECIPES)]] = field(default_factory=list)
    # steps of every head
    steps: OneOrMore = 200
    # floating point operations of a head's training beyond the target's, in place of steps;
    # 0 = steps
    flops: NotNegative = 0.0
    # the target reads the conversations once and its features are stored (some 8 kB a token);
    # false = every head's training runs the target
    features: bool = True
    # further keys of every training command, such as target=tiny or seed=1
    more: list[str] = field(default_factory=list)
    # JSONL of prompts to score the heads on (scripts/evaluate.py); empty = they are not scored
    prompts: str = ""
    # further keys of the scoring commands, such as num_prompts=16 or batch_size=8
    scoring: list[str] = field(default_factory=list)
    # the same for T = 1 alone
    sampling: list[str] = field(default_factory=list)


def read(data: Path) -> list[str]:
    """What is read by which target: the same for the features and for every head."""
    return ["target=smollm2", "data=jsonl", f"data.path={data}", "data.max_length=320"]


def features(cfg: HeadsConfig, data: Path) -> Step:
    """The target's pass over the conversations, for the heads that are asked for."""
    out = Path(cfg.out) / "features"
    kinds = sorted({RECIPES[name][0] for name in cfg.heads or RECIPES})
    args = [
        "scripts/cache_features.py",
        *read(data),
        f"heads=[{','.join(kinds)}]",
        f"out={out}",
        *(key for key in cfg.more if key.startswith(READ)),
    ]
    return Step("the target reads them, once for all heads", args, [data], out / "manifest.json")


def keys(cfg: HeadsConfig, name: str, data: Path, steps: int) -> list[str]:
    """The command line of a recipe behind its script."""
    stored = [f"data.features={Path(cfg.out) / 'features'}"] if cfg.features else []
    return [
        *read(data),
        *RECIPES[name][1],
        *stored,
        "head.draft_vocab=4096",
        "batch_size=16",
        f"out_dir={Path(cfg.out) / name}",
        f"steps={steps}",
        "eval.every=0",
        "eval.parity=2",
        *cfg.more,
    ]


def counted(cfg: HeadsConfig, name: str, data: Path) -> float:
    """Floating point operations of a step of a recipe beyond the target's."""
    config, schema = ENTRIES[RECIPES[name][0]]
    run_cfg: Any = compose(config, schema, keys(cfg, name, data, 1))
    target = load_target(run_cfg.target, run_cfg.dtype, "cpu")
    args = (target.tokenizer, target.eos_ids, target.vocab_size, target.context_length)
    rows = load_rows(run_cfg.data, *args)
    plan = Plan(rows, run_cfg.batch_size, run_cfg.data.window, run_cfg.seed)
    torch.manual_seed(hash_u63(run_cfg.seed, "head"))
    head = measured_head(run_cfg.head, target, rows)
    few = plan.batch(0)[:: max(1, plan.batch_size // FEW)][:FEW]
    tokens = float(rows.lengths[plan.train].double().mean()) * plan.batch_size
    return tokens * draft_flops(target, head, rows.batch(few))


@entry("train_heads", HeadsConfig)
def main(cfg: HeadsConfig) -> None:
    """Run the steps that are not done yet."""
    os.chdir(files.ROOT)
    out, data = Path(cfg.out), Path(cfg.path).expanduser()
    if cfg.prompts:
        load_prompts(cfg.prompts, [])  # what is not there is said before hours of training
    out.mkdir(parents=True, exist_ok=True)
    if not cfg.path:
        data = out / "data.jsonl"
        target = next((k for k in reversed(cfg.more) if k.startswith("target=")), "target=smollm2")
        write = ["scripts/synthesize.py", target, f"out={data}", "seed=0"]
        write.append(f"num_conversations={cfg.conversations}")
        _do(Step("the target writes conversations", write, [], data), out)
    reads = [data]
    if cfg.features:
        store = features(cfg, data)
        _do(store, out)
        reads = [store.leaves]
    found: dict[str, Any] = {"data_sha256": sha256_file(data), "heads": {}}
    for name in cfg.heads or RECIPES:
        flops = counted(cfg, name, data)
        steps = max(1, round(cfg.flops / flops)) if cfg.flops else cfg.steps
        args = [f"train/{ENTRIES[RECIPES[name][0]][0]}.py", *keys(cfg, name, data, steps)]
        _do(Step(f"{name}, {steps} steps", args, reads, out / name / "head" / "head.json"), out)
        found["heads"][name] = {"steps": steps, "flops_per_step": flops, "flops": flops * steps}
        files.write_json(out / "heads.json", found)
    if cfg.prompts:
        scored(cfg, found, out)


def score(cfg: HeadsConfig, temperature: int) -> Step:
    """All heads on the same prompts, each as a chain and as a tree."""
    folders = [str(Path(cfg.out) / name) for name in cfg.heads or RECIPES]
    drafters = ["none", *(f"{folder}@{shape}" for folder in folders for shape in matched.SHAPES)]
    out = Path(cfg.out) / f"t{temperature}"
    args = [
        "scripts/evaluate.py",
        "target=smollm2",
        f"drafters=[{','.join(drafters)}]",
        f"prompts={cfg.prompts}",
        f"temperature={temperature}",
        "max_new_tokens=64",
        "parity=0",
        f"out={out}",
        *(key for key in cfg.more if key.startswith(("target", "dtype=", "device="))),
        *cfg.scoring,
        *(cfg.sampling if temperature else []),
    ]
    reads = [Path(cfg.prompts), *(Path(folder) / "head" / "head.json" for folder in folders)]
    return Step(f"scores at T = {temperature}", args, reads, out / "report.json")


def scored(cfg: HeadsConfig, trained: dict[str, Any], out: Path) -> None:
    """Score the heads and join it with what they cost: OUT/matched.json."""
    reports = {}
    for temperature in (0, 1):
        step = score(cfg, temperature)
        _do(step, out, (0, SKIPPED))  # the table has a dash for what could not be scored
        reports[str(temperature)] = json.loads(step.leaves.read_text())
    drafters = {name: str(out / name) for name in trained["heads"]}
    about = {"command": files.command(), "environment": reports["0"]["environment"]}
    found = {**about, **matched.matched(trained, drafters, reports)}
    files.write_json(out / "matched.json", found)
    print(matched.markdown(found), flush=True)


def _do(step: Step, out: Path, good: Collection[int] = (0,)) -> None:
    if done(step, out):
        print(f"{step.title}: done already ({step.leaves})", flush=True)
        return
    print(f"{step.title}\n  python {shlex.join(step.args)}", flush=True)
    run(step, "heads", out, good)
    remember(step, out)


if __name__ == "__main__":
    main()
