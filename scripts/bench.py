"""Speed ratios, each with its spread, both sides measured by turns in one run.

    # all of BENCHES; merges into docs/results/bench.json
    python scripts/bench.py
    python scripts/bench.py only=[tree_score]     # some of them

A bench is a function (target loader, cfg) -> dict with at least `ratio` {mean, low, high} or
`rows`; add it to BENCHES. Every entry keeps the command, the commit and the machine that gave
it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json

import numpy as np
import torch
from rich.console import Console

from conf.errors import UserError
from conf.schema import entry
from decode.engine import Request, generate
from decode.models.load import TargetConfig, load_target
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, TreeShape
from heads import resolve_drafter
from scripts.common import files
from scripts.common.prompts import Prompt, chat_ids, load_prompts
from scripts.common.verify_cost import verify_cost
from scripts.scoring import contest
from scripts.scoring.lanes import lanes_of
from scripts.scoring.score import Scores


@dataclass
class BenchConfig:
    """Keys of scripts/bench.py."""

    # the model that is measured
    target: TargetConfig = field(default_factory=TargetConfig)
    # names of benches to run; [] = all
    only: list[str] = field(default_factory=list)
    # JSON file; entries of benches that do not run now are kept
    out: str = "docs/results/bench.json"
    # prompt file
    prompts: str = "scripts/prompts/demo.jsonl"
    # prompts of the decoding benches
    num_prompts: int = 16
    # tokens per answer
    max_new_tokens: int = 64
    # paired repetitions of the single-pass benches
    rounds: int = 60
    # committed tokens when single passes are timed
    context: int = 128
    # drafters of the throughput bench, beside plain decoding: "ngram", "runs/medusa@tree", ...
    drafters: list[str] = field(default_factory=list)
    # separate draft model of the assisted benches: a run of train/draft.py or a model folder
    draft: str = "runs/draft"
    # batch sizes of the throughput bench
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    # cpu, cuda; null = the GPU when there is one
    device: str | None = None
    # seed of intervals and prompts' order
    seed: int = 0

    def validate(self) -> list[str]:
        found = [
            f"only: no bench {name}; known: {', '.join(BENCHES)}"
            for name in self.only
            if name not in BENCHES
        ]
        for key in ("num_prompts", "rounds"):
            if getattr(self, key) < 2:
                found.append(
                    f"{key}: {getattr(self, key)} is below 2; an interval needs at least two"
                )
        if self.max_new_tokens < 2:
            found.append(
                f"max_new_tokens: {self.max_new_tokens} is below 2; the first token is "
                "the prefill's"
            )
        return found


SKIPPED = 3


def none_vs_hf(dtype: str) -> Callable[[BenchConfig], dict[str, Any]]:
    """Tokens per second of NoDraft through our engine over Hugging Face generate's, greedy,
    batch 1, interleaved.
    """

    def bench(cfg: BenchConfig) -> dict[str, Any]:
        target = load_target(cfg.target, dtype, cfg.device)
        lanes, _ = lanes_of(["none", "hf_generate"], target)
        settings = contest.Settings(Sampling(), cfg.max_new_tokens, 1, cfg.seed, "traversal")
        measured = contest.run_contest(target, target.tokenizer, some(cfg), lanes, settings)
        scores = Scores(measured, lanes, cfg.seed)
        units = scores.units()
        return {
            "ratio": scores.speedup("none", "hf_generate", units),
            "ratio_end_to_end": scores.speedup("none", "hf_generate", units, whole=True),
            "tokens_per_second": {
                lane.name: scores.rate(lane.name, units, False) for lane in lanes
            },
            "prompts": len(units),
            "dtype": dtype,
        }

    return bench


def against_assisted(temperature: float) -> Callable[[BenchConfig], dict[str, Any]]:
    """Tokens per second of our speculative decoding over Hugging Face's assisted generation
    with the same separate draft and K (constant schedule, no confidence threshold), bf16,
    batch 1, interleaved.
    """

    def bench(cfg: BenchConfig) -> dict[str, Any]:
        target = load_target(cfg.target, "bfloat16", cfg.device)
        ours, theirs = f"{cfg.draft}@chain", f"hf_assisted@{cfg.draft}"
        lanes, skipped = lanes_of(["none", ours, theirs, "hf_generate"], target)
        if skipped:
            raise UserError(f"draft: {skipped[0]['reason']}")
        settings = contest.Settings(
            Sampling(temperature), cfg.max_new_tokens, 1, cfg.seed, "traversal"
        )
        measured = contest.run_contest(target, target.tokenizer, some(cfg), lanes, settings)
        scores = Scores(measured, lanes, cfg.seed)
        units, found = scores.units(), [scores.row(lane) for lane in lanes]
        return {
            "ratio": scores.speedup(ours, theirs, units),
            "ratio_end_to_end": scores.speedup(ours, theirs, units, whole=True),
            "over_generate": {
                row["name"]: scores.speedup(row["name"], "hf_generate", units) for row in found
            },
            "tokens_per_second": {row["name"]: row["tokens_per_second"] for row in found},
            "accepted_length": {row["name"]: row["accepted_length"] for row in found},
            "draft_ms": {row["name"]: row["draft_ms"] for row in found},
            "verify_ms": {row["name"]: row["verify_ms"] for row in found},
            "steady": scores.steadiness(),
            "k": lanes[1].depth,
            "temperature": temperature,
            "prompts": len(units),
            "dtype": "bfloat16",
        }

    bench.__doc__ = against_assisted.__doc__
    return bench


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
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    with torch.inference_mode():
        for number in range(cfg.rounds + 5):
            for name, tree in list(trees.items())[:: 1 if number % 2 else -1]:
                start = clock(target)
                target.score(cache, last, tree)
                spent = clock(target) - start
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


def batch_throughput(cfg: BenchConfig) -> dict[str, Any]:
    """Greedy tokens per second against batch size, plain and with each of `drafters`, bf16,
    all taking turns over three rounds; stops_paying is the first batch size at which a drafter
    is no faster than plain decoding.
    """
    target = load_target(cfg.target, "bfloat16", cfg.device)
    ids = [chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in some(cfg)]
    drafters = {name: resolve_drafter(name, target) for name in ["none", *cfg.drafters]}
    cases = [(size, name) for size in cfg.batch_sizes for name in drafters]
    rates: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for turn in range(3):
        for size, name in cases[:: -1 if turn % 2 else 1]:
            requests = [
                Request(ids[i % len(ids)], cfg.max_new_tokens, id=i) for i in range(max(size, 4))
            ]
            run = generate(
                target, drafters[name], requests, Sampling(), batch_size=size, eos_ids=()
            )
            rates[size, name].append(
                sum(len(g.token_ids) - 1 for g in run.generations) / run.timing.decode_s
            )
    rows: list[dict[str, Any]] = []
    for (size, name), found in rates.items():
        plain, alone = np.array(rates[size, "none"]), np.array(rates[cfg.batch_sizes[0], name])
        over = np.array(found) / plain
        rows.append(
            {
                "batch_size": size,
                "drafter": name,
                "tokens_per_second": float(np.median(found)),
                "lowest": min(found),
                "highest": max(found),
                "over_batch_1": float(np.median(found / alone)),
                "speedup": {
                    "mean": float(np.median(over)),
                    "low": float(over.min()),
                    "high": float(over.max()),
                },
            }
        )
    stops = {
        name: next(
            (r["batch_size"] for r in rows if r["drafter"] == name and r["speedup"]["mean"] <= 1),
            None,
        )
        for name in cfg.drafters
    }
    return {"rows": rows, "stops_paying": stops, "dtype": "bfloat16"}


def verification(cfg: BenchConfig) -> dict[str, Any]:
    """Time to verify 8 sampled trees of 64 nodes as a share of the target's pass over them,
    bf16, both rules.
    """
    target = load_target(cfg.target, "bfloat16", cfg.device)
    with torch.inference_mode():
        ids = [
            chat_ids(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in some(cfg)
        ]
        found = verify_cost(
            target, [ids[i % len(ids)] for i in range(8)], max(cfg.rounds // 5, 2), cfg.seed
        )
    return {**found, "dtype": "bfloat16"}


BENCHES: dict[str, Callable[[BenchConfig], dict[str, Any]]] = {
    "none_vs_hf_bf16": none_vs_hf("bfloat16"),
    "none_vs_hf_fp32": none_vs_hf("float32"),
    "draft_vs_hf_assisted_t0": against_assisted(0.0),
    "draft_vs_hf_assisted_t1": against_assisted(1.0),
    "tree_score": tree_score,
    "verify_cost": verification,
    "batch_throughput": batch_throughput,
}
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


def some(cfg: BenchConfig) -> list[Prompt]:
    """Prompts spread over the file, so over its categories."""
    prompts = load_prompts(cfg.prompts)
    if len(prompts) < 2:
        raise UserError(
            f"prompts: {cfg.prompts} holds {len(prompts)}; a ratio with an interval "
            "needs at least two"
        )
    return prompts[:: max(len(prompts) // cfg.num_prompts, 1)][: cfg.num_prompts]


def median_ratio(a: np.ndarray, b: np.ndarray, seed: int) -> dict[str, float]:
    """Ratio of medians with its 95 % bootstrap interval over paired rounds."""
    pick = np.random.default_rng(seed).integers(0, len(a), (2000, len(a)))
    low, high = np.percentile(np.median(a[pick], 1) / np.median(b[pick], 1), [2.5, 97.5])
    return {"mean": float(np.median(a) / np.median(b)), "low": float(low), "high": float(high)}


def clock(target: Target) -> float:
    """Seconds, after the device has done its work."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


@entry("bench", BenchConfig)
def main(cfg: BenchConfig) -> int:
    """Run the benches one by one; each result is written as soon as it is there. Exit code 3
    when one was skipped.
    """
    console, out, code = Console(), Path(cfg.out), 0
    for name in cfg.only or BENCHES:
        console.print(f"[bold]{name}[/bold]", highlight=False)
        try:
            result = BENCHES[name](cfg)
        except UserError as error:
            if cfg.only:
                raise
            console.print(f"  skipped: {error}", style="yellow", highlight=False)
            code = SKIPPED
            continue
        known = json.loads(out.read_text()) if out.exists() else {}
        about = none_vs_hf if name.startswith("none") else BENCHES[name]
        known[name] = {
            "about": " ".join((about.__doc__ or "").split()),
            **result,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": files.command(),
            "environment": files.environment(cfg.device or "cpu"),
        }
        files.write_json(out, known)
        if "ratio" in result:
            r = result["ratio"]
            console.print(
                f"  ratio {r['mean']:.3f} [{r['low']:.3f}, {r['high']:.3f}]", highlight=False
            )
        for row in result.get("rows", []):
            if "case" in row:
                console.print(f"  {row['case']}: {row['share']:.1%} of the pass", highlight=False)
            else:
                speed = f"{row['tokens_per_second']:.1f} tokens/s, x{row['speedup']['mean']:.2f}"
                console.print(
                    f"  batch {row['batch_size']}, {row['drafter']}: {speed}", highlight=False
                )
    console.print(f"written: {out}", highlight=False)
    return code


if __name__ == "__main__":
    main()
