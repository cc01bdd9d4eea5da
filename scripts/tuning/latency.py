"""The latency curves of this machine, measured inside the decode loop itself.

Single passes in a tight loop run faster than in a real one, where other code uses the caches
in between; so everything here is timed in `decode.engine.generate`. The loop's own parts come
from a drafter that costs nothing (`Star`), a drafter's from `Shadow`
(scripts/tuning/replay.py), all cases taking turns.

Shape letters: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Request, Timing, generate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.scripts.common.clock import clock
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.tuning.cost import OBSERVE, PROPOSE, CostModel, Curve, CycleShape, LinearCost
from outrider.scripts.tuning.replay import CallTimes, Shadow

LOOP = ("target", "verify", "cache", "python")


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


@dataclass(frozen=True)
class TimedSetting:
    """A setting whose drafter is timed. kind: "chain" or "tree"."""

    kind: str
    shape: CycleShape
    drafter: Drafter


@dataclass(frozen=True)
class Bench:
    """What everything is timed with: the engine's own loop on a target, prompts and a
    distribution."""

    target: Target
    prompts: Sequence[list[int]]
    sampling: Sampling

    def time(self, drafter: Drafter, rows: int, tokens: int, turn: int = 0) -> Timing:
        """Of `rows` answers of so many tokens, decoded together, beginning with prompt `turn`."""
        requested = [
            Request(self.prompts[(turn + i) % len(self.prompts)], tokens, id=i) for i in range(rows)
        ]
        run = generate(self.target, drafter, requested, self.sampling, batch_size=rows, eos_ids=())
        return run.timing

    def loop(
        self,
        nodes: Sequence[int],
        batch_sizes: Sequence[int],
        rounds: int,
        cycles: int,
        on_progress: OnProgress,
    ) -> list[dict[str, Any]]:
        """Raw samples of the loop's parts over (B, N). Every round visits all cases in another
        order."""
        stars = {n: Star(n, self.target) if n else NoDraft() for n in sorted({0, *nodes})}
        cases = [(b, n) for b in sorted(set(batch_sizes)) for n in stars]
        generator = np.random.default_rng(0)
        samples: list[dict[str, Any]] = []
        for turn in range(rounds + 1):
            for number, at in enumerate(generator.permutation(len(cases)), turn * len(cases) + 1):
                batch, n = cases[at]
                timing = self.time(stars[n], batch, cycles + 1 if turn else 3, turn)
                if turn:  # the first round warms caches, allocators and layouts
                    per = 1000 / max(timing.cycles, 1)
                    parts = (timing.target_s, timing.verify_s, timing.commit_s)
                    rest = max(timing.decode_s - sum(parts) - timing.draft_s, 0.0)
                    found = dict(zip(LOOP, (per * x for x in (*parts, rest)), strict=True))
                    samples.append({"batch_size": batch, "nodes": n, **found})
                on_progress(number, (rounds + 1) * len(cases))
        return samples

    def drafters(
        self,
        probes: Sequence[TimedSetting],
        batch_sizes: Sequence[int],
        tokens: int,
        on_progress: OnProgress,
    ) -> dict[str, dict[str, dict[int, LinearCost]]]:
        """{"propose": kind -> batch size -> fit, "observe": the same}, from a plain run in
        which all probes draft."""
        found: dict[str, dict[str, dict[int, LinearCost]]] = {"propose": {}, "observe": {}}
        inners = {str(i): probe.drafter for i, probe in enumerate(probes)}
        sizes = sorted(set(batch_sizes))
        for number, batch in enumerate(sizes):
            shadow = Shadow(inners, keep=False, sync=clock(self.target.device))
            self.time(shadow, batch, 3)  # warms up
            shadow.clocks = {name: CallTimes() for name in inners}
            on_progress(2 * number + 1, 2 * len(sizes))
            self.time(shadow, batch, tokens)
            on_progress(2 * number + 2, 2 * len(sizes))
            for kind in {p.kind for p in probes}:
                rows, spent, seen, read = [], [], [], []
                for probe, timed in zip(probes, shadow.clocks.values(), strict=True):
                    if probe.kind != kind:
                        continue
                    rows.append(probe.shape.features())
                    spent.append(
                        1000 * float(np.median([s for b, s in timed.propose if b == batch]))
                    )
                    by_tokens: dict[int, list[float]] = {}
                    for _, n, s in timed.observe:
                        by_tokens.setdefault(n, []).append(s)
                    for n, seconds in by_tokens.items():
                        seen.append({"one": 1.0, "tokens": float(n)})
                        read.append(1000 * float(np.median(seconds)))
                found["propose"].setdefault(kind, {})[batch] = LinearCost.fit(rows, spent, PROPOSE)
                found["observe"].setdefault(kind, {})[batch] = LinearCost.fit(seen, read, OBSERVE)
        return found

    def extra_per_level(
        self,
        model: CostModel,
        probes: Sequence[TimedSetting],
        tokens: int,
        batch: int,
        on_progress: OnProgress,
    ) -> dict[str, float]:
        """Per kind: milliseconds of verification, commit and Python per drafted level beyond
        what the loop's curves say, from a real speculative run of one probe (what is beyond
        them is little); 0 where there is nothing beyond them."""
        beyond: dict[str, float] = {}
        kinds = {p.kind: p for p in probes}
        for number, (kind, probe) in enumerate(kinds.items(), 1):
            timing = self.time(probe.drafter, batch, tokens + 1)
            if timing.cycles and probe.shape.depth:
                rest = timing.decode_s - timing.target_s - timing.draft_s
                price = model.cycle(batch, probe.shape, kind)
                known = price.verify + price.cache + price.python
                known += model.observing(batch, kind, 1.5)
                per_level = (1000 * rest / timing.cycles - known) / probe.shape.depth
                beyond[kind] = max(per_level, 0.0)
            on_progress(number, len(kinds))
        return beyond


def curves_of(samples: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """The curve of each of the loop's parts, from the samples of all batch sizes."""
    return {
        part: Curve.fit((s["batch_size"], s["nodes"], s[part]) for s in samples) for part in LOOP
    }
