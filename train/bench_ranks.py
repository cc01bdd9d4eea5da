"""How much two processes lose to one another: their tokens/s against two independent runs side
by side.

    OMP_NUM_THREADS=1 python train/bench_ranks.py target=smollm2 head=medusa data.path=FILE \\
        steps=16 batch_size=8 rounds=3 out_dir=runs/ranks

Takes the keys of scripts/validate.py. Each round runs (a) two independent training runs of one
process at the same time and (b) one run of two processes, in turns; batch_size rows per
process in both. Steps after the first half count. Also
timed: an all-reduce of the head's gradient. Writes OUT_DIR/ranks.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from conf.commit import commit
from conf.errors import UserError, last_line
from conf.jsonl import records
from conf.rules import OneOrMore
from conf.schema import entry
from heads import HEADS
from train.config import ENTRIES
from train.validate import ValidateConfig, head_config

ROOT = Path(__file__).resolve().parents[1]
EXCHANGE = """
import json, sys, time, torch, torch.distributed as dist
cuda = torch.cuda.is_available() and sys.argv[2] != "cpu"
dist.init_process_group("nccl" if cuda else "gloo")
device = f"cuda:{dist.get_rank()}" if cuda else "cpu"
x, seconds = torch.ones(int(sys.argv[1]), device=device), []
for _ in range(8):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(x)
    if cuda:
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)
if dist.get_rank() == 0:
    print(json.dumps(sorted(seconds)[3]))
dist.destroy_process_group()
"""


@dataclass
class RanksConfig(ValidateConfig):
    """Keys of train/bench_ranks.py: those of a run, and"""

    # how often both ways take their turn
    rounds: OneOrMore = 3


def torchrun(*args: str) -> list[str]:
    """Command line of two processes on this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        *args,
    ]


def start(command: list[str], cfg: RanksConfig) -> subprocess.Popen[str]:
    """A child with one thread for each of its processes."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **({"ACCELERATE_USE_CPU": "true"} if cfg.device == "cpu" else {}),
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(child: subprocess.Popen[str]) -> str:
    """Its stdout. Raises UserError with its last words when it failed."""
    out, err = child.communicate()
    if child.returncode:
        raise UserError(f"a run of the measurement failed: {last_line(err)}")
    return out


def rate(out: Path) -> tuple[float, float]:
    """(tokens/s, seconds per step) of the second half of a run."""
    lines = records(out / "metrics.jsonl")
    steps = [line for line in lines if "tokens_per_second" in line]
    seconds = (steps[-1]["time"] - steps[-2]["time"]) / (steps[-1]["step"] - steps[-2]["step"])
    return float(steps[-1]["tokens_per_second"]), seconds


@dataclass(frozen=True)
class Round:
    """What a round found: tokens/s of two runs side by side and of one run of two processes,
    seconds per step of both, bytes of the head."""

    alone: float
    together: float
    steps_alone: list[float]
    step_together: float
    size: int


def one_round(cfg: RanksConfig, script: str, keys: list[str], folder: Path, number: int) -> Round:
    """Two independent runs at the same time, then one of two processes."""
    outs = [folder / f"{number}-{i}" for i in range(3)]
    pair = [
        start(
            [
                *(sys.executable, script, *keys),
                f"batch_size={cfg.batch_size}",
                f"seed={cfg.seed + i}",
                f"out_dir={outs[i]}",
            ],
            cfg,
        )
        for i in range(2)
    ]
    for child in pair:
        finish(child)
    both = [*keys, f"batch_size={2 * cfg.batch_size}", f"out_dir={outs[2]}"]
    finish(start(torchrun(script, *both), cfg))
    first, second, joint = (rate(out) for out in outs)
    size = (outs[0] / "head" / "head.safetensors").stat().st_size
    return Round(first[0] + second[0], joint[0], [first[1], second[1]], joint[1], size)


def exchange_seconds(cfg: RanksConfig, folder: Path, size: int) -> float:
    """Of one all-reduce of `size` bytes between two processes."""
    file = folder / "exchange.py"
    file.write_text(EXCHANGE)
    command = torchrun(str(file), str(size // 4), cfg.device or "cpu")
    return float(json.loads(finish(start(command, cfg))))


def measure(cfg: RanksConfig, given: list[str]) -> dict[str, Any]:
    """Rates of all rounds, their ratio, and the time of one gradient exchange. Raises UserError
    for a head whose weights are no file of its own."""
    kind = head_config(cfg.head).kind
    if HEADS[kind].trains_target or not HEADS[kind].reads_features:
        raise UserError(f"head.kind: {kind} moves more than a head; choose another kind")
    own = ("rounds=", "out_dir=", "batch_size=", "steps=", "log_every=", "save_every=", "eval.")
    half = max(1, cfg.steps // 2)
    keys = [a for a in given if not a.startswith(own)]
    keys += [f"steps={2 * half}", f"log_every={half}", "save_every=0", "eval.every=0"]
    keys += ["eval.parity=0"]
    script = str(ROOT / "train" / f"{ENTRIES[kind][0]}.py")
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as name:
        for k in range(cfg.rounds):
            found = one_round(cfg, script, keys, Path(name), k)
            print(
                f"round {k + 1}: two runs {found.alone:,.0f}, two processes "
                f"{found.together:,.0f} tokens/s, {found.together / found.alone:.3f}",
                file=sys.stderr,
                flush=True,
            )
            rounds.append(found)
        exchange = exchange_seconds(cfg, Path(name), rounds[-1].size)
    ratios = [r.together / r.alone for r in rounds]
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "two_runs_tokens_per_second": [r.alone for r in rounds],
        "two_processes_tokens_per_second": [r.together for r in rounds],
        "step_seconds": {
            "alone": statistics.median(s for r in rounds for s in r.steps_alone),
            "together": statistics.median(r.step_together for r in rounds),
        },
        "gradient_bytes": rounds[-1].size,
        "all_reduce_seconds": exchange,
        "head": kind,
        "rows_per_process": cfg.batch_size,
        "rounds": cfg.rounds,
        "dtype": cfg.dtype,
        "steps": 2 * half,
        "command": "python train/bench_ranks.py "
        + " ".join(a for a in given if not a.startswith("data.")),
        "environment": {"torch": torch.__version__, "cpus": os.cpu_count(), "commit": commit()},
    }


@entry("bench_ranks", RanksConfig)
def main(cfg: RanksConfig) -> None:
    """Measure and write OUT_DIR/ranks.json."""
    report = measure(cfg, sys.argv[1:])
    path = Path(cfg.out_dir) / "ranks.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"two processes reach {report['ratio']:.3f} ({report['ratio_low']:.3f} to "
        f"{report['ratio_high']:.3f}) of two "
        f"independent runs; exchange of {report['gradient_bytes']:,} bytes: "
        f"{report['all_reduce_seconds']:.3f} s; "
        f"{path}"
    )


if __name__ == "__main__":
    main()
