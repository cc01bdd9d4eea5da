"""What a target's pass over a tree and its verification cost, both sides measured by turns in one
run. Drafters, transformers' own decoding and batch sizes are what evaluate.py compares.

    # all of BENCHES; merges into docs/results/bench.json
    python scripts/lab/bench.py
    python scripts/lab/bench.py only=[tree_score]     # some of them

A bench is a function cfg -> dict with at least `ratio` {mean, low, high} or `rows`; add it to
BENCHES. Every entry keeps the command, the commit and the machine that gave it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json

import numpy as np
import torch
from annotated_types import Ge
from rich.console import Console

from conf.errors import UserError
from conf.rules import OneOrMore, Seed, one_of
from conf.schema import entry
from decode.models import packed
from decode.models.load import TargetConfig, load_target
from decode.target import Target
from decode.tree import DraftTree, TreeShape
from scripts.common import files
from scripts.common.clock import clock
from scripts.common.prompts import Prompt, chat_ids, load_prompts
from scripts.lab.verify_cost import verify_cost


@dataclass
class BenchConfig:
    """Keys of scripts/lab/bench.py."""

    # the model that is measured
    target: TargetConfig = field(default_factory=TargetConfig)
    # names of benches to run; [] = all
    only: list[Annotated[str, one_of(BENCHES)]] = field(default_factory=list)
    # JSON file; entries of benches that do not run now are kept
    out: str = "docs/results/bench.json"
    # prompt file of the bench verify_cost
    prompts: str = "scripts/prompts/demo.jsonl"
    # paired repetitions; some benches do fewer, but at least five
    rounds: Annotated[int, Ge(2)] = 60
    # committed tokens of the bench tree_score
    context: OneOrMore = 128
    # cpu, cuda; null = the GPU when there is one
    device: str | None = None
    # seed of intervals and draws
    seed: Seed = 0


def tree_score(cfg: BenchConfig) -> dict[str, Any]:
    """Time to score a 16-node tree over that of a single-token step, bf16, batch 1,
    alternating passes.
    """
    target = load_target(cfg.target, "bfloat16", cfg.device)
    shape = TreeShape.of(SIXTEEN)
    tokens = torch.arange(16, device=target.device)[None] + 5
    trees = {"single": DraftTree.empty(1, target.device), "tree": DraftTree.static(shape, tokens)}
    cache = target.new_cache(1, cfg.context + 4 * cfg.rounds + 32, 16)
    target.prefill(cache, [torch.arange(cfg.context, device=target.device) % 1000 + 5])
    last = torch.tensor([7], device=target.device)
    now = clock(target.device)
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    with torch.inference_mode():
        for number in range(cfg.rounds + 5):
            for name, tree in list(trees.items())[:: 1 if number % 2 else -1]:
                start = now()
                target.score(cache, last, tree)
                spent = now() - start
                cache.commit(
                    torch.full((1, 1), -1, device=target.device), torch.zeros(1, dtype=torch.int64)
                )
                if number >= 5:  # the first passes warm caches and allocators
                    seconds[name].append(spent)
    return {
        "ratio": median_ratio(np.array(seconds["tree"]), np.array(seconds["single"]), cfg.seed),
        "median_ms": {name: 1000 * float(np.median(s)) for name, s in seconds.items()},
        "rounds": cfg.rounds,
        "context": cfg.context,
        "dtype": "bfloat16",
    }


def verification(cfg: BenchConfig) -> dict[str, Any]:
    """Time to verify 8 sampled trees of 64 nodes as a share of the target's pass over them,
    bf16, both rules.
    """
    target = load_target(cfg.target, "bfloat16", cfg.device)
    with torch.inference_mode():
        found = verify_cost(target, questions(cfg, target), max(cfg.rounds // 5, 2), cfg.seed)
    return {**found, "dtype": "bfloat16"}


def packed_pass(cfg: BenchConfig) -> dict[str, Any]:
    """Time of a pass with packed weights over that with the weights as they were loaded, bf16,
    batch 1, alternating passes over the last token and a chain of so many nodes. ratio: of the
    single token.
    """
    if torch.device(cfg.device or "cpu").type != "cpu" or not packed.available():
        raise UserError("only: packed_pass needs device=cpu with oneDNN's bfloat16 kernels")
    targets = {
        pack: load_target(replace(cfg.target, pack=pack), "bfloat16", "cpu")
        for pack in ("none", "auto")
    }
    passes: dict[str, Any] = {}
    with torch.inference_mode():
        for nodes in (0, 4, 8, 12, 16, 24):
            seconds = alternated(targets, nodes, cfg)
            ratio = median_ratio(seconds["auto"], seconds["none"], cfg.seed)
            median = {pack: 1000 * float(np.median(s)) for pack, s in seconds.items()}
            passes[str(nodes)] = {"ratio": ratio, "median_ms": median}
    return {
        "ratio": passes["0"]["ratio"],
        "passes": passes,
        "packed_layers": targets["auto"].packed_layers,
        "extra_bytes": targets["auto"].packing.extra,
        "rounds": cfg.rounds,
        "context": cfg.context,
        "dtype": "bfloat16",
    }


def alternated(targets: dict[str, Target], nodes: int, cfg: BenchConfig) -> dict[str, np.ndarray]:
    """Seconds [rounds] of a pass over a chain of `nodes`, the targets taking turns."""
    caches, last = {}, torch.tensor([7])
    for name, target in targets.items():
        caches[name] = target.new_cache(1, cfg.context + 32, nodes)
        target.prefill(caches[name], [torch.arange(cfg.context) % 1000 + 5])
    chain = DraftTree.chain(torch.arange(nodes)[None] + 5, torch.tensor([nodes]))
    tree = chain if nodes else DraftTree.empty(1, torch.device("cpu"))
    now = clock(torch.device("cpu"))  # weights are packed there alone
    seconds: dict[str, list[float]] = {name: [] for name in targets}
    for number in range(cfg.rounds + 5):
        for name, target in list(targets.items())[:: 1 if number % 2 else -1]:
            start = now()
            target.score(caches[name], last, tree)
            spent = now() - start
            caches[name].truncate([cfg.context])  # the same text again
            if number >= 5:
                seconds[name].append(spent)
    return {name: np.array(values) for name, values in seconds.items()}


BENCHES: dict[str, Callable[[BenchConfig], dict[str, Any]]] = {
    "tree_score": tree_score,
    "verify_cost": verification,
    "packed_pass": packed_pass,
}
ROWS = 8  # of the batches whose verification is timed
# Widths 4, 5, 4, 3: wide near the root, as trees fitted to Medusa heads are.
SIXTEEN = [
    (0,),
    (1,),
    (2,),
    (3,),
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 0),
    (2, 0),
    (0, 0, 0),
    (0, 0, 1),
    (0, 1, 0),
    (1, 0, 0),
    (0, 0, 0, 0),
    (0, 0, 0, 1),
    (0, 1, 0, 0),
]


def some(prompts: list[Prompt]) -> list[Prompt]:
    """ROWS prompts spread over the file, so over its categories; again from the first where it
    holds fewer.
    """
    chosen = prompts[:: max(len(prompts) // ROWS, 1)]
    return [chosen[i % len(chosen)] for i in range(ROWS)]


def questions(cfg: BenchConfig, target: Target) -> list[list[int]]:
    """Token ids of the first turns of `some` prompts."""
    prompts = some(load_prompts(cfg.prompts))
    return [chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in prompts]


def median_ratio(a: np.ndarray, b: np.ndarray, seed: int) -> dict[str, float]:
    """Ratio of medians with its 95 % bootstrap interval over paired rounds."""
    pick = np.random.default_rng(seed).integers(0, len(a), (2000, len(a)))
    low, high = np.percentile(np.median(a[pick], 1) / np.median(b[pick], 1), [2.5, 97.5])
    return {"mean": float(np.median(a) / np.median(b)), "low": float(low), "high": float(high)}


@entry("bench", BenchConfig)
def main(cfg: BenchConfig) -> None:
    """Run the benches one by one; each result is written as soon as it is there."""
    console, out = Console(), Path(cfg.out)
    for name in cfg.only or BENCHES:
        console.print(f"[bold]{name}[/bold]", highlight=False)
        result = BENCHES[name](cfg)
        known = json.loads(out.read_text()) if out.exists() else {}
        known[name] = {
            "about": " ".join((BENCHES[name].__doc__ or "").split()),
            **result,
            **files.origin(cfg.device or "cpu"),
        }
        files.write_json(out, known)
        if "ratio" in result:
            r = result["ratio"]
            console.print(
                f"  ratio {r['mean']:.3f} [{r['low']:.3f}, {r['high']:.3f}]", highlight=False
            )
        for row in result.get("rows", []):
            console.print(f"  {row['case']}: {row['share']:.1%} of the pass", highlight=False)
    console.print(f"written: {out}", highlight=False)


if __name__ == "__main__":
    main()
