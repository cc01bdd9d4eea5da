"""The latency curves of this machine, measured inside the decode loop itself.

Single passes in a tight loop run faster than in a real one, where other code uses the caches
in between; so everything here is timed in `decode.engine.generate`. The loop's own parts come
from a drafter that costs nothing (`Star`), a drafter's from `Shadow`
(scripts/tuning/replay.py), all cases taking turns.

Shape letters: B rows, N nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.drafters import Drafter, NoDraft
from decode.engine import Request, generate
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, TreeShape
from scripts.tuning.cost import OBSERVE, PROPOSE, CostModel, Curve, Linear, Shape
from scripts.tuning.replay import Shadow

LOOP = ("target", "verify", "cache", "python")
Tick = Callable[[], Any]


class Star(NoDraft):
    """Proposes N different tokens below the last one, hardly ever right: the price of
    verifying N nodes, without a drafter's own. On a target that takes chains only, a chain."""

    shape = "tree"

    def __init__(self, nodes: int, target: Target) -> None:
        super().__init__()
        tree = target.support == "tree"
        self.tree = TreeShape.of([(i,) for i in range(nodes)]) if tree else TreeShape.chain(nodes)
        self.max_nodes, self.max_depth = nodes, self.tree.depth
        stride = max((target.vocab_size - 1) // max(nodes, 1), 1)
        self.tokens = (
            torch.arange(nodes, device=target.device) * stride + stride // 2
        ) % target.vocab_size

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tokens = self.tokens.expand(self.rows, -1)
        return DraftTree.static(self.tree, tokens, self.tree.size_at(budget))


def clock(target: Target) -> Callable[[], float]:
    """Seconds, after the device has done its work."""
    if target.device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(target.device)
        return time.perf_counter()

    return now


def requests_of(
    prompts: Sequence[list[int]], rows: int, tokens: int, turn: int = 0
) -> list[Request]:
    return [Request(prompts[(turn + i) % len(prompts)], tokens, id=i) for i in range(rows)]


def loop_curves(
    target: Target,
    prompts: Sequence[list[int]],
    nodes: Sequence[int],
    batch_sizes: Sequence[int],
    rounds: int,
    cycles: int,
    sampling: Sampling,
    tick: Tick = lambda: None,
) -> tuple[dict[str, Curve], list[dict[str, Any]]]:
    """Curves of the loop's parts over (B, N), and the raw samples. Every round visits all
    cases in another order.
    """
    stars = {n: Star(n, target) if n else NoDraft() for n in sorted({0, *nodes})}
    cases = [(b, n) for b in sorted(set(batch_sizes)) for n in stars]
    generator = np.random.default_rng(0)
    samples: list[dict[str, Any]] = []
    for turn in range(rounds + 1):
        for at in generator.permutation(len(cases)):
            batch, n = cases[at]
            asked = requests_of(prompts, batch, 3 if turn == 0 else cycles + 1, turn)
            timing = generate(
                target, stars[n], asked, sampling, batch_size=batch, eos_ids=()
            ).timing
            if turn:  # the first round warms caches, allocators and layouts
                per = 1000 / max(timing.cycles, 1)
                parts = (timing.target_s, timing.verify_s, timing.commit_s)
                rest = max(timing.decode_s - sum(parts) - timing.draft_s, 0.0)
                found = dict(zip(LOOP, (per * x for x in (*parts, rest)), strict=True))
                samples.append({"batch_size": batch, "nodes": n, **found})
            tick()
    curves = {
        part: Curve.fit((s["batch_size"], s["nodes"], s[part]) for s in samples) for part in LOOP
    }
    return curves, samples


@dataclass(frozen=True)
class Probe:
    """A setting whose drafter is timed. kind: "chain" or "tree"."""

    kind: str
    shape: Shape
    drafter: Drafter


def drafter_fits(
    target: Target,
    probes: Sequence[Probe],
    prompts: Sequence[list[int]],
    batch_sizes: Sequence[int],
    tokens: int,
    sampling: Sampling,
    tick: Tick = lambda: None,
) -> dict[str, dict[str, dict[int, Linear]]]:
    """{"propose": kind -> batch size -> fit, "observe": the same}, from a plain run in which
    all probes draft.
    """
    found: dict[str, dict[str, dict[int, Linear]]] = {"propose": {}, "observe": {}}
    for batch in sorted(set(batch_sizes)):
        shadow = Shadow(
            {str(i): p.drafter for i, p in enumerate(probes)}, keep=False, sync=clock(target)
        )
        for turn in range(2):  # the first one warms up
            for timed in shadow.clocks.values():
                timed.propose.clear()
                timed.observe.clear()
            asked = requests_of(prompts, batch, tokens if turn else 3)
            generate(target, shadow, asked, sampling, batch_size=batch, eos_ids=())
            tick()
        for kind in {p.kind for p in probes}:
            rows, spent, seen, read = [], [], [], []
            for i, probe in enumerate(probes):
                if probe.kind != kind:
                    continue
                timed = shadow.clocks[str(i)]
                rows.append(probe.shape.features())
                spent.append(1000 * float(np.median([s for b, s in timed.propose if b == batch])))
                by_tokens: dict[int, list[float]] = {}
                for _, n, s in timed.observe:
                    by_tokens.setdefault(n, []).append(s)
                for n, seconds in by_tokens.items():
                    seen.append({"one": 1.0, "tokens": float(n)})
                    read.append(1000 * float(np.median(seconds)))
            found["propose"].setdefault(kind, {})[batch] = Linear.fit(rows, spent, PROPOSE)
            found["observe"].setdefault(kind, {})[batch] = Linear.fit(seen, read, OBSERVE)
    return found


def extra_per_level(
    target: Target,
    model: CostModel,
    probes: Sequence[Probe],
    prompts: Sequence[list[int]],
    tokens: int,
    sampling: Sampling,
    batch: int,
    tick: Tick = lambda: None,
) -> dict[str, float]:
    """Per kind: milliseconds of verification, commit and Python per drafted level beyond what
    the loop's curves say, from real speculative runs; 0 where there is nothing beyond them."""
    beyond: dict[str, list[float]] = {}
    last = {
        p.kind: p for p in probes
    }  # one per kind is enough: what is beyond the curves is little
    for probe in last.values():
        asked = requests_of(prompts, batch, tokens + 1)
        timing = generate(
            target, probe.drafter, asked, sampling, batch_size=batch, eos_ids=()
        ).timing
        if timing.cycles and probe.shape.depth:
            rest = timing.decode_s - timing.target_s - timing.draft_s
            price = model.cycle(batch, probe.shape, probe.kind)
            known = price.verify + price.cache + price.python
            known += _observe(model, probe.kind, batch)
            beyond.setdefault(probe.kind, []).append(
                (1000 * rest / timing.cycles - known) / probe.shape.depth
            )
        tick()
    return {kind: max(float(np.median(found)), 0.0) for kind, found in beyond.items()}


def _observe(model: CostModel, kind: str, batch: int) -> float:
    by = model.observe[kind]
    return by[min(by, key=lambda b: abs(b - batch))](one=1.0, tokens=1.5)
