"""How close training comes to what the arithmetic allows, for any kind of head, measured in one
run and written as JSON.

    python train/bench.py target=smollm2 head=eagle3 data.path=FILE out_dir=runs/bench steps=8

Takes the keys of scripts/validate.py. Round by round, on the same batches: whole training
steps; the target's forward inside them; one matrix product with its two gradients, of the
shape of the draft's LM head and in the run's dtype, for the device's own speed. The head's
arithmetic is counted (train/measure/speed.py), and what it would take at that speed, with the
target's time, is the bound: a step takes 1 / ratio times what it must. With
data.features=FOLDER every round also steps on stored features, in turns, and the losses of
both are compared. Parts are interleaved so that a drifting machine hurts them alike, and the
median over the rounds counts.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from outrider.conf.commit import commit
from outrider.conf.schema import entry
from outrider.decode.target import Target
from outrider.heads.base import Batch, Head
from outrider.heads.losses import chunk_of
from outrider.train.begin import measured
from outrider.train.config import TrainConfig
from outrider.train.measure.speed import draft_flops
from outrider.train.stored.features import CachedTarget, Source
from outrider.train.texts.batches import BatchPlan
from outrider.train.validate import ValidateConfig, with_head

Pass = tuple[Batch, Target | CachedTarget]
PARTS = ("target", "head_loss", "backward", "optimizer")


@dataclass
class DeviceClock:
    """Seconds of a device. On one CPU thread its own seconds, which other work on the machine
    does not lengthen."""

    device: torch.device
    seconds: Callable[[], float] = time.perf_counter
    kind: str = "wall seconds"

    def __post_init__(self) -> None:
        if self.device.type == "cpu" and torch.get_num_threads() == 1:
            self.seconds, self.kind = time.process_time, "CPU seconds"

    def __call__(self) -> float:
        """Now, after all work that the device was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.seconds()


@dataclass
class StepTimes:
    """Seconds of an optimizer step and of its parts. loss: per supervised token."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    seconds: float = 0.0
    loss: float = 0.0


@dataclass
class Rounds:
    """What was timed. online, stored: steps by the target's own forward and on stored features.
    speeds: FLOP/s of a matrix product. flops: of the head, a token. tokens, supervised, padded:
    of all rounds but the first."""

    online: list[StepTimes] = field(default_factory=list)
    stored: list[StepTimes] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    flops: float = 0.0
    tokens: int = 0
    supervised: int = 0
    padded: int = 0

    def count(self, batches: list[Batch]) -> None:
        """Add the tokens of a round."""
        self.tokens += sum(int(b.mask.sum()) for b in batches)
        self.padded += sum(b.mask.numel() for b in batches)
        self.supervised += sum(int(b.loss_mask.sum()) for b in batches)


def measure(cfg: ValidateConfig) -> dict[str, Any]:
    """Seconds per round of every part, medians and ratios. Raises UserError for a configuration
    that cannot be trained."""
    run, target, head, plan = measured(with_head(cfg))
    evals = replace(run.eval, every=max(1, run.eval.every))  # then the target's layers stay
    run = replace(run, eval=evals)
    source = Source(run, head, target, plan.rows)
    clock = DeviceClock(target.device)
    timed = _rounds(run, target, head, plan, source, clock)
    each = timed.flops * timed.tokens / run.steps
    seconds = sum(step.seconds for step in timed.online)
    report = _report(timed.online, [each / speed for speed in timed.speeds])
    report |= {
        "draft_flops_per_token": timed.flops,
        "matrix_product_flops_per_second": statistics.median(timed.speeds),
        "tokens_per_second": timed.tokens / seconds,
        "supervised_per_second": timed.supervised / seconds,
        "clock": clock.kind,
        "padding": 1 - timed.tokens / timed.padded,
        "rounds": run.steps,
        "batch_size": run.batch_size,
        "dtype": run.dtype,
        "head": {k: v for k, v in asdict(head.cfg).items() if not isinstance(v, dict)},
        "loss": asdict(head.cfg.loss),
        "target": target.identity.name if target.identity else None,
        "command": "python train/bench.py "
        + " ".join(a for a in sys.argv[1:] if not a.startswith(("data.path", "out_dir"))),
        "environment": {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "commit": commit(),
        },
    }
    if source.store:
        report["stored"] = _against(timed.online, timed.stored) | {
            "dtype": source.store.stored,
            "bytes_per_token": source.store.bytes_per_token(head.taps),
        }
    return report


def _rounds(
    cfg: TrainConfig,
    target: Target,
    head: Head,
    plan: BatchPlan,
    source: Source,
    clock: DeviceClock,
) -> Rounds:
    """cfg.steps rounds behind one that warms up."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=cfg.optim.lr or 0.0, fused=True)
    found = Rounds()
    head.train()
    for k in range(cfg.steps + 1):
        size = cfg.micro_batch, cfg.micro_tokens
        parts = plan.micro_batches(k, 0, 1, *size, pack=source.pack)
        made = [plan.rows.batch(part, source.pack) for part in parts]
        batches = [batch.to(target.device) for batch in made]
        if k == 0:
            found.flops = draft_flops(target, head, batches[0])
            one_step(head, [(b, target) for b in batches], optimizer, clock)
            continue
        found.speeds.append(product_speed(head, target, batches[0], clock))
        ways: list[tuple[list[StepTimes], list[Pass]]] = [
            (found.online, [(b, target) for b in batches])
        ]
        if source.store:
            read = [(b, source(at)) for b, at in zip(batches, made, strict=True)]
            ways.insert(k % 2, (found.stored, read))
        before = [w.detach().clone() for w in head.parameters()]
        for steps, passes in ways:
            with torch.no_grad():  # both ways start from the same weights
                for weight, old in zip(head.parameters(), before, strict=True):
                    weight.copy_(old)
            steps.append(one_step(head, passes, optimizer, clock))
        found.count(batches)
    return found


def one_step(
    head: Head, passes: list[Pass], optimizer: torch.optim.Optimizer, clock: DeviceClock
) -> StepTimes:
    """One update over the batches of `passes`, each with the target that it reads, timed."""
    found = StepTimes()
    first = clock()
    for batch, target in passes:
        start, inside = clock(), found.parts["target"]
        with _timed_features(target, clock, found):
            out = head(batch, target)
        spent = clock() - start
        found.parts["head_loss"] += spent - (found.parts["target"] - inside)
        start = clock()
        out.sum.backward()
        found.parts["backward"] += clock() - start
        found.loss += float(out.sum.detach()) / float(out.count) / len(passes)
    start = clock()
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    found.parts["optimizer"] = clock() - start
    found.seconds = clock() - first
    return found


@contextlib.contextmanager
def _timed_features(
    target: Target | CachedTarget, clock: DeviceClock, found: StepTimes
) -> Iterator[None]:
    """Add to `found` what the target's features take inside."""
    features = target.features

    def timed(*args: Any, **kwargs: Any) -> Tensor:
        start = clock()
        result: Tensor = features(*args, **kwargs)
        found.parts["target"] += clock() - start
        return result

    with mock.patch.object(target, "features", timed):
        yield


def product_speed(head: Head, target: Target, batch: Batch, clock: DeviceClock) -> float:
    """FLOP/s of a matrix product with both gradients: the supervised rows that are met at once,
    by the target's width, by the draft vocabulary."""
    size = chunk_of(head.cfg.chunk, target.device)
    rows = max(1, min(int(batch.loss_mask.sum()), size))
    vocab = head.cfg.draft_vocab or target.vocab_size
    x = torch.randn(rows, target.hidden_size, device=target.device, dtype=target.dtype)
    weight = torch.randn(vocab, target.hidden_size, device=target.device, dtype=target.dtype)
    start = clock()
    z = x @ weight.T
    _ = z.T @ x
    _ = z @ weight
    return 3 * 2 * rows * target.hidden_size * vocab / max(clock() - start, 1e-9)


def _report(steps: list[StepTimes], least: list[float]) -> dict[str, Any]:
    """least: seconds that the head's arithmetic of each step must take."""
    ratios = [
        (step.parts["target"] + own) / step.seconds for step, own in zip(steps, least, strict=True)
    ]
    middle = {name: statistics.median(step.parts[name] for step in steps) for name in PARTS}
    whole = statistics.median(step.seconds for step in steps)
    shares = {name: seconds / whole for name, seconds in middle.items()}
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "share_of_step": shares,
        "bottleneck": max(shares, key=lambda name: shares[name]),
        "seconds": {**middle, "step": whole, "arithmetic": statistics.median(least)},
    }


def _against(online: list[StepTimes], stored: list[StepTimes]) -> dict[str, Any]:
    """What stored features save, and how far the losses lie apart."""
    ratios = [a.seconds / b.seconds for a, b in zip(online, stored, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "features_share_of_step": {
            name: statistics.median(step.parts["target"] / step.seconds for step in steps)
            for name, steps in (("online", online), ("stored", stored))
        },
        "largest_relative_loss_difference": max(
            abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(online, stored, strict=True)
        ),
    }


@entry("validate", ValidateConfig)
def main(cfg: ValidateConfig) -> None:
    """Measure and write OUT_DIR/bench.json."""
    report = measure(cfg)
    path = Path(cfg.out_dir) / "bench.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    shares = ", ".join(f"{k} {v:.0%}" for k, v in report["share_of_step"].items())
    print(
        f"{report['ratio']:.0%} of the rate that target and arithmetic allow "
        f"({report['ratio_low']:.0%} to {report['ratio_high']:.0%}); "
        f"{report['tokens_per_second']:,.0f} tokens/s, "
        f"{report['supervised_per_second']:,.0f} supervised/s; step: {shares}; {path}"
    )
    if stored := report.get("stored"):
        print(
            f"stored features: {stored['ratio']:.2f}x ({stored['ratio_low']:.2f} to "
            f"{stored['ratio_high']:.2f}); losses differ by "
            f"{stored['largest_relative_loss_difference']:.1e}"
        )


if __name__ == "__main__":
    main()
