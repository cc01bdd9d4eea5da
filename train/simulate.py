"""How a run would scale: a simulation on paper from measured step parts, for numbers of GPUs
that nobody lent us.

    python train/simulate.py target=smollm2 head=eagle3 data.path=FILE gpus=[8,64,512] \\
        ranks=runs/ranks/ranks.json

Takes the keys of scripts/validate.py. What it assumes is printed and written with the result:

- compute: FLOPs per token, counted by torch on a real micro-batch, x tokens of a rank /
`flops` (achieved, not peak);
- imbalance: all ranks wait for the one with the most padded tokens. No assumption: read off
the planned batches;
- exchange: the head's float32 gradient once per step, as a reduce-scatter inside each node, a
  ring among the nodes and an all-gather, at `node_bandwidth` and `net_bandwidth` per GPU with
  `latency` per hop. `overlap` of the backward pass (`backward` of the compute) hides it;
- features: with data.features what every GPU must read per second from storage.

Not simulated: stragglers other than by length, network contention, evaluation, checkpoints.
With ranks=FILE (from train/bench_ranks.py) the same formula first predicts that measurement,
with its own compute and exchange times. Writes OUT_DIR/scaling.json.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.utils.flop_counter import FlopCounterMode

from conf.errors import UserError
from conf.schema import entry
from decode.models.load import load_target
from train.facts import measured_head
from train.log import git_commit
from train.texts.batches import Plan, Rows, hash_u63, load_rows
from train.validate import ValidateConfig, head_config


@dataclass
class SimulateConfig(ValidateConfig):
    """Keys of train/simulate.py: those of a run (batch_size: rows of one GPU), and"""

    # numbers of GPUs to simulate
    gpus: list[int] = field(default_factory=lambda: [8, 64, 512])
    # GPUs of a node
    per_node: int = 8
    # FLOP/s that a GPU achieves on this work; an H100 at 30 % of its dense bf16 peak
    flops: float = 3e14
    # bytes/s of an all-reduce inside a node, per GPU
    node_bandwidth: float = 3e11
    # bytes/s of the network, per GPU: 400 Gbit/s at 80 %
    net_bandwidth: float = 4e10
    # seconds of one hop of a collective
    latency: float = 2e-5
    # share of compute that is the backward pass
    backward: float = 0.2
    # share of the backward pass that can hide the exchange
    overlap: float = 0.5
    # FLOPs of a token; 0 = count them on the configured target and head
    flops_per_token: float = 0.0
    # bytes of the gradient; 0 = those of the configured head
    gradient_bytes: float = 0.0
    # JSON of train/bench_ranks.py to check the formula against; empty = no check
    ranks: str = ""

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        keys = ("per_node", "flops", "node_bandwidth", "net_bandwidth")
        found = [
            f"{k}: {getattr(self, k)} is not above 0; give more"
            for k in keys
            if not getattr(self, k) > 0
        ]
        found += [
            f"{k}: {getattr(self, k)} is outside [0, 1]; it is a share"
            for k in ("backward", "overlap")
            if not 0 <= getattr(self, k) <= 1
        ]
        found += [f"gpus: {n} is below 1; give 1 or more" for n in self.gpus if n < 1]
        return found + super().validate()


def exchange_seconds(count: int, size: float, cfg: SimulateConfig) -> float:
    """An all-reduce of `size` bytes over `count` GPUs, in nodes of per_node."""
    inside = min(count, cfg.per_node)
    nodes = math.ceil(count / cfg.per_node)
    ring = 2 * (inside - 1) / inside * size / cfg.node_bandwidth
    across = 2 * (nodes - 1) / nodes * (size / inside) / cfg.net_bandwidth
    return ring + across + cfg.latency * 2 * ((inside - 1) + math.ceil(math.log2(nodes)))


def step_seconds(compute: float, imbalance: float, exchange: float, hidden: float) -> float:
    """All ranks wait for the slowest; what of the exchange does not fit under `hidden` seconds
    is added.
    """
    return compute * imbalance + max(0.0, exchange - hidden)


def imbalance(rows: Rows, per_rank: int, count: int, cfg: SimulateConfig, steps: int = 32) -> float:
    """Mean over steps of (most padded tokens of a rank / mean of the ranks). Data smaller than
    a batch is repeated.
    """
    lengths = rows.lengths[~rows.held]
    copies = math.ceil(4 * per_rank * count / lengths.numel())
    big = lengths.repeat(copies)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), big.cumsum(0)])
    fake = Rows(
        rows.name,
        torch.zeros(0),
        torch.zeros(0),
        offsets,
        torch.arange(big.numel()),
        torch.zeros(big.numel(), dtype=torch.bool),
        [],
    )
    plan = Plan(fake, per_rank * count, cfg.data.window, cfg.seed)
    found = []
    for k in range(min(steps, plan.per_epoch)):
        batch = big[torch.tensor(plan.batch(k))]
        width = batch.view(per_rank, count).amax(0)  # rank r takes every count-th row
        found.append(float(width.max() / width.double().mean()))
    return sum(found) / len(found)


def cost_of_a_token(cfg: SimulateConfig) -> tuple[float, float, Rows, int]:
    """(FLOPs per token, gradient bytes, rows, feature bytes per token) of the configured run."""
    typed = head_config(cfg.head)
    target = load_target(cfg.target, cfg.dtype, cfg.device or None)
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )
    torch.manual_seed(hash_u63(cfg.seed, "head"))
    head = measured_head(typed, target, rows)
    batch = rows.batch(Plan(rows, 2, cfg.data.window, cfg.seed).batch(0)).to(target.device)
    with FlopCounterMode(display=False) as counter:
        head(batch, target).sum.backward()
    size = sum(p.numel() for p in head.parameters() if p.requires_grad) * 4
    stored = len({*head.taps, target.num_layers}) * target.hidden_size * target.dtype.itemsize
    return counter.get_total_flops() / int(batch.mask.sum()), size, rows, stored


def simulate(cfg: SimulateConfig) -> dict[str, Any]:
    """Every number of GPUs, and the check against the measurement."""
    per_token, size, rows, stored = cost_of_a_token(cfg)
    per_token, size = cfg.flops_per_token or per_token, cfg.gradient_bytes or size
    tokens = float(rows.lengths.double().mean()) * cfg.batch_size
    compute = per_token * tokens / cfg.flops
    hidden = cfg.overlap * cfg.backward * compute
    lines = []
    for count in cfg.gpus:
        uneven = imbalance(rows, cfg.batch_size, count, cfg)
        exchange = exchange_seconds(count, size, cfg)
        step = step_seconds(compute, uneven, exchange, hidden)
        lines.append(
            {
                "gpus": count,
                "tokens_per_second": count * tokens / step,
                "efficiency": compute / step,
                "imbalance": uneven,
                "exchange_seconds": exchange,
                "step_seconds": step,
                "feature_bytes_per_second_per_gpu": stored * tokens / step,
            }
        )
    names = (
        "per_node",
        "flops",
        "node_bandwidth",
        "net_bandwidth",
        "latency",
        "backward",
        "overlap",
        "batch_size",
    )
    return {
        "simulated": True,
        "assumptions": {k: getattr(cfg, k) for k in names},
        "flops_per_token": per_token,
        "gradient_bytes": size,
        "tokens_per_gpu_and_step": tokens,
        "compute_seconds": compute,
        "gpus": lines,
        "check": check(cfg, rows) if cfg.ranks else None,
        "command": "python train/simulate.py "
        + " ".join(a for a in sys.argv[1:] if not a.startswith("data.")),
        "commit": git_commit(),
    }


def check(cfg: SimulateConfig, rows: Rows) -> dict[str, float]:
    """The formula on two processes of one machine, with measured compute and exchange, against
    the measured ratio.
    """
    try:
        found = json.loads(Path(cfg.ranks).read_text())
        compute, exchange = found["step_seconds"]["alone"], found["all_reduce_seconds"]
        uneven = imbalance(rows, found["rows_per_process"], 2, cfg)
        measured = found["ratio"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"ranks: {cfg.ranks} is no result of train/bench_ranks.py ({type(error).__name__})"
        ) from None
    predicted = compute / step_seconds(
        compute, uneven, exchange, cfg.overlap * cfg.backward * compute
    )
    return {
        "predicted_ratio": predicted,
        "measured_ratio": measured,
        "error": predicted / measured - 1,
        "imbalance": uneven,
        "compute_seconds": compute,
        "exchange_seconds": exchange,
    }


@entry("simulate", SimulateConfig)
def main(cfg: SimulateConfig) -> None:
    """Simulate, print a table and write OUT_DIR/scaling.json."""
    from rich.console import Console
    from rich.table import Table

    report = simulate(cfg)
    path = Path(cfg.out_dir) / "scaling.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    table = Table(
        "GPUs",
        "tokens/s",
        "efficiency",
        "imbalance",
        "exchange ms",
        "step ms",
        "features GB/s",
        box=None,
    )
    for line in report["gpus"]:
        table.add_row(
            str(line["gpus"]),
            f"{line['tokens_per_second']:,.0f}",
            f"{line['efficiency']:.0%}",
            f"{line['imbalance']:.3f}",
            f"{line['exchange_seconds'] * 1e3:.2f}",
            f"{line['step_seconds'] * 1e3:.2f}",
            f"{line['feature_bytes_per_second_per_gpu'] * line['gpus'] / 1e9:,.1f}",
        )
    Console().print(table)
    if report["check"]:
        c = report["check"]
        print(
            f"check on two processes: {c['predicted_ratio']:.3f} predicted, "
            f"{c['measured_ratio']:.3f} measured "
            f"({c['error']:+.1%})"
        )
    print(f"simulated, not measured; {path}")


if __name__ == "__main__":
    main()
