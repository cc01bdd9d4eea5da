"""From what was measured to report.json. Every metric is decode.stats' own; this file only
groups and pairs.

The accepted length counts the bonus token and is taken over clean cycles: not cut by a stop
token or the limit, not inside a loop; those two are reported apart. The unit that is resampled
for intervals is the prompt with all its turns (for times with batch_size > 1: the chunk of
prompts that ran together).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.decode import stats
from outrider.decode.engine import Cycle
from outrider.heads.names import NONE
from outrider.scripts.scoring.breakdown import breakdown
from outrider.scripts.scoring.contest import Contest, ScoredAnswer, System, TimedRun

REPORTED = ("trained_for", "weights_sha256", "hub")  # of a system's facts, where they are known
# 90th over 10th percentile of the time of a plain pass; a quiet machine stays below 1.2.
UNLIKE = 1.5


class Scores:
    """The contest, indexed by drafter and prompt."""

    def __init__(self, contest: Contest, systems: Sequence[System], seed: int = 0) -> None:
        self.seed, self.systems = seed, list(systems)
        # servers that do not say what they accepted: of their cycles nothing is known
        self.silent = {system.name for system in systems if not system.facts.get("tells", True)}
        self.answers: dict[str, dict[str, list[ScoredAnswer]]] = {
            system.name: {} for system in systems
        }
        self.timed_runs: dict[str, dict[tuple[str, ...], list[TimedRun]]] = {
            system.name: {} for system in systems
        }
        for answer in contest.answers:
            self.answers[answer.drafter].setdefault(answer.prompt_id, []).append(answer)
        for timed_run in contest.timed_runs:
            # A chunk whose shorter prompts are through keeps its first prompt's unit.
            units = self.timed_runs[timed_run.drafter]
            unit = next(
                (u for u in units if timed_run.turn and set(timed_run.prompts) <= set(u)),
                timed_run.prompts,
            )
            units.setdefault(unit, []).append(timed_run)
        self.prompts = list(next(iter(self.answers.values()), {}))
        self.category = {
            p: rows[0].category for rows_of in self.answers.values() for p, rows in rows_of.items()
        }

    def clean(self, name: str, prompts: Sequence[str]) -> list[list[Cycle]]:
        """[prompt][cycle]: the cycles that count."""
        if name in self.silent:
            return [[] for _ in prompts]
        return [
            [c for a in self.answers[name][p] for c in stats.split(a.generation).clean]
            for p in prompts
        ]

    def units(self, category: str | None = None) -> list[tuple[str, ...]]:
        """The timed units whose prompts are all of `category` (None: every unit)."""
        units = next(iter(self.timed_runs.values()), {})
        return [
            u for u in units if category is None or all(self.category[p] == category for p in u)
        ]

    def work(
        self, name: str, units: Sequence[tuple[str, ...]], whole: bool
    ) -> tuple[list[float], list[float]]:
        """(tokens, seconds) per unit: end to end, or of decoding alone (the prefill's token is
        not its work).
        """
        tokens, seconds = [], []
        for unit in units:
            timed_runs = self.timed_runs[name][unit]
            tokens.append(
                float(
                    sum(
                        timed_run.tokens if whole else timed_run.decoded for timed_run in timed_runs
                    )
                )
            )
            timings = [timed_run.timing for timed_run in timed_runs]
            seconds.append(sum(t.total_s if whole else t.decode_s for t in timings))
        return tokens, seconds

    def speedup(
        self, a: str, b: str, units: Sequence[tuple[str, ...]], whole: bool = False
    ) -> dict[str, Any]:
        """Tokens per second of `a` over those of `b`, paired by unit."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = stats.ratio_of_rates(
                *self.work(a, units, whole), *self.work(b, units, whole), self.seed
            )
        return plain(ratio.json())

    def cycle_ms(
        self, name: str, phases: Sequence[str], units: Sequence[tuple[str, ...]]
    ) -> dict[str, Any]:
        """Milliseconds per cycle spent in `phases`, resampled by unit."""
        timed_runs = [self.timed_runs[name][unit] for unit in units]
        spent = [
            1000 * sum(getattr(timed_run.timing, f"{p}_s") for timed_run in one for p in phases)
            for one in timed_runs
        ]
        passes = [float(sum(timed_run.timing.cycles for timed_run in one)) for one in timed_runs]
        return plain(stats.ratio_interval(spent, passes, self.seed).json())  # type: ignore[no-any-return]

    def break_even(self, system: System, units: Sequence[tuple[str, ...]]) -> float | None:
        """Accepted length at which the drafter's cycles, as long as they were, would be as
        fast as plain decoding.
        """
        _, spent = self.work(system.name, units, False)
        tokens, base = (sum(part) for part in self.work(NONE, units, False))
        passes, plain_passes = (
            sum(timed_run.timing.cycles for u in units for timed_run in self.timed_runs[n][u])
            for n in (system.name, NONE)
        )
        if not system.nodes or not passes or not plain_passes or not tokens or not base:
            return None
        answers = [a for u in units for p in u for a in self.answers[system.name][p]]
        cycles = sum(len(a.generation.cycles) for a in answers)
        rows = cycles / passes if cycles else 1.0  # that a target pass serves on average
        return (sum(spent) / passes) / (base / tokens) / rows

    def rate(self, name: str, units: Sequence[tuple[str, ...]], whole: bool) -> float | None:
        tokens, seconds = self.work(name, units, whole)
        return sum(tokens) / sum(seconds) if sum(seconds) > 0 else None

    def row(self, system: System) -> dict[str, Any]:
        """One entry of report.json's `drafters`."""
        units = self.units()
        clean = self.clean(system.name, self.prompts)
        speed = self._speed(system, units)
        return plain(
            {
                "name": system.name,
                "kind": system.kind,
                "shape": system.shape,
                "label": system.label,
                "max_depth": system.depth,
                "max_nodes": system.nodes,
                **self._accepted(system, clean),
                **speed,
                "break_even": self.break_even(system, units),
                "parameters": system.facts.get("parameters"),
                "bytes": system.facts.get("bytes"),
                "training": system.facts.get("training"),
                **{k: v for k, v in system.facts.items() if k in REPORTED},
                **self._parts(system, [c for cycles in clean for c in cycles]),
                **self._times(system, units, speed["speedup"]["mean"]),
                "per_prompt": [
                    self._prompt(system, p, cycles)
                    for p, cycles in zip(self.prompts, clean, strict=True)
                ],
                "units": [
                    {"prompts": list(unit), "tokens": tokens, "seconds": spent}
                    for unit, tokens, spent in zip(
                        units, *self.work(system.name, units, False), strict=True
                    )
                ],
            }
        )

    def _accepted(self, system: System, clean: list[list[Cycle]]) -> dict[str, Any]:
        """What was written and accepted. clean: the cycles of every prompt that count."""
        answers = [a for rows in self.answers[system.name].values() for a in rows]
        seen = [] if system.name in self.silent else answers
        splits = [stats.split(a.generation) for a in seen]
        flat = [c for cycles in clean for c in cycles]
        cut = [c for p in splits for c in p.cut]
        loop = [c for p in splits for c in p.loop]
        totals = system.facts.get("totals_alone", False)
        everything = [
            [c for a in self.answers[system.name][p] if seen for c in a.generation.cycles]
            for p in self.prompts
        ]
        return {
            "tokens": sum(len(a.generation.token_ids) for a in answers),
            "cycles": len(flat),
            "accepted_length": stats.accepted_length(clean, self.seed).json(),
            "acceptance_by_position": [] if totals else self._positions(flat, clean),
            "acceptance_by_rank": [] if totals else stats.acceptance_by_rank(flat),
            "cut_cycles": {
                "cycles": len(cut),
                "draft_tokens_accepted": sum(c.accepted for c in cut),
            },
            "loop_cycles": {
                "cycles": len(loop),
                "accepted_length": _mean([c.accepted + 1 for c in loop]),
            },
            "accepted_length_all_cycles": stats.accepted_length(everything, self.seed).json(),
            "by_category": {
                c: self._category(system, c) for c in sorted(set(self.category.values()))
            },
        }

    def _speed(self, system: System, units: Sequence[tuple[str, ...]]) -> dict[str, Any]:
        """Tokens per second, and against plain decoding."""
        name = system.name
        return {
            "tokens_per_second": self.rate(name, units, False),
            "tokens_per_second_interval": stats.ratio_interval(
                *self.work(name, units, False), self.seed
            ).json(),
            "speedup": self.speedup(name, NONE, units),
            "end_to_end": {
                "tokens_per_second": self.rate(name, units, True),
                "speedup": self.speedup(name, NONE, units, whole=True),
            },
        }

    def _times(
        self, system: System, units: Sequence[tuple[str, ...]], speedup: float | None
    ) -> dict[str, Any]:
        """Peak memory, and where the time of a cycle goes."""
        name = system.name
        timed_runs = [
            timed_run for timed_runs in self.timed_runs[name].values() for timed_run in timed_runs
        ]
        timings = [timed_run.timing for timed_run in timed_runs]
        passes = sum(t.cycles for t in timings)
        draft, target = sum(t.draft_s for t in timings), sum(t.target_s for t in timings)
        checked = sum(t.verify_s + t.commit_s for t in timings)
        decoded = sum(self.work(name, units, False)[0])
        outside = system.facts.get("totals_alone", False)  # a server
        parts = None if outside else breakdown(timings, decoded, speedup)
        inside = {  # what is seen in this process alone
            "peak_bytes": max((timed_run.peak or 0 for timed_run in timed_runs), default=0) or None,
            "draft_ms_interval": self.cycle_ms(name, ("draft",), units),
            "verify_ms_interval": self.cycle_ms(name, ("target", "verify", "commit"), units),
            "draft_ms": _per(draft, passes),
            "verify_ms": _per(target + checked, passes),
            "target_ms": _per(target, passes),
            "target_passes": passes,
        }
        return {
            **(dict.fromkeys(inside) if outside else inside),
            "prefill_seconds": sum(t.prefill_s for t in timings),
            "ms_per_token": parts["ms_per_token"] if parts else {},
            "breakdown": parts,
        }

    def _parts(self, system: System, flat: list[Cycle]) -> dict[str, Any]:
        """Who of a union proposed what was accepted; {} for a single drafter."""
        parts = system.facts.get("parts", [])
        message = zip(parts, stats.acceptance_by_drafter(flat, len(parts)), strict=True)
        rows = [{"name": n, "accepted": count, "alone": alone} for n, (count, alone) in message]
        return {"by_drafter": rows} if rows else {}

    def _positions(self, flat: list[Cycle], clean: list[list[Cycle]]) -> list[dict[str, Any]]:
        if not flat:
            return []
        spread = stats.position_intervals(clean, self.seed)
        return [
            {**p.json(), "conditional_interval": c.json(), "unconditional_interval": u.json()}
            for p, (c, u) in zip(stats.acceptance_by_position(flat), spread, strict=True)
        ]

    def _category(self, system: System, category: str) -> dict[str, Any]:
        name = system.name
        prompts = [p for p in self.prompts if self.category[p] == category]
        units = self.units(category)
        clean = self.clean(name, prompts)
        return {
            "prompts": len(prompts),
            "cycles": sum(map(len, clean)),
            "accepted_length": stats.accepted_length(clean, self.seed).json(),
            "tokens_per_second": self.rate(name, units, False),
            "speedup": self.speedup(name, NONE, units) if units else None,
        }

    def _prompt(self, system: System, prompt: str, cycles: list[Cycle]) -> dict[str, Any]:
        answers, alone = self.answers[system.name][prompt], (prompt,)
        return {
            "prompt_id": prompt,
            "category": self.category[prompt],
            "accepted_length": _mean([c.accepted + 1 for c in cycles]),
            "speedup": self.speedup(system.name, NONE, [alone])["mean"]
            if alone in self.timed_runs[system.name]
            else None,
            "cycles": len(cycles),
            "tokens": sum(len(a.generation.token_ids) for a in answers),
            "finish": [a.generation.finish for a in answers],
        }

    def steadiness(self) -> dict[str, Any]:
        """Milliseconds per target pass of `none` by timed unit. Not steady: the 90th percentile
        is above 1.5 times the 10th, so something else was using the machine. Which speeds that
        puts in doubt, their intervals say (scripts/reports/score_table.py: unsteady)."""
        spent = []
        for timed_runs in self.timed_runs["none"].values():
            passes = sum(timed_run.timing.cycles for timed_run in timed_runs)
            spent += (
                [1000 * sum(timed_run.timing.decode_s for timed_run in timed_runs) / passes]
                if passes
                else []
            )
        if not spent:
            return {"low": None, "median": None, "high": None, "steady": True}
        low, median, high = np.percentile(spent, [10, 50, 90]).tolist()
        return {"low": low, "median": median, "high": high, "steady": high <= UNLIKE * low}

    def pairs(self) -> list[dict[str, Any]]:
        """Paired differences of accepted length between drafters that draft, and speed ratios
        between all.
        """
        out = []
        for a, b in itertools.combinations(self.systems, 2):
            pair: dict[str, Any] = {
                "a": a.name,
                "b": b.name,
                "speed_ratio": self.speedup(a.name, b.name, self.units()),
            }
            if a.nodes and b.nodes:
                mine, theirs = (self.clean(system.name, self.prompts) for system in (a, b))
                difference = stats.paired_difference(mine, theirs, self.seed)
                pair["accepted_length_difference"] = plain(difference.json())
            out.append(pair)
        return out


def output_lines(contest: Contest) -> list[dict[str, Any]]:
    """The lines of outputs.jsonl. drafted: accepted draft tokens, the first ones of what each of
    `cycles` committed. by: of a union, who proposed each of them, bit k for its k-th drafter. cut,
    loop: places in `cycles` of those that are counted apart.
    """
    lines = []
    for a in contest.answers:
        g = a.generation
        looping = stats.loop_starts(g.token_ids)
        # Tokens that each cycle committed: fewer than accepted + 1 where a stop token or the
        # limit cut it.
        starts = [*(c.start for c in g.cycles), len(g.token_ids)]
        drafted = [sum(g.from_draft[start:end]) for start, end in itertools.pairwise(starts)]
        by = [b for c, n in zip(g.cycles, drafted, strict=True) for b in c.drafters[:n]]
        lines.append(
            {
                "drafter": a.drafter,
                "prompt_id": a.prompt_id,
                "turn": a.turn,
                "category": a.category,
                "prompt_ids": list(g.prompt_ids),
                "token_ids": g.token_ids,
                "cycles": [end - start for start, end in itertools.pairwise(starts)],
                "proposed": [c.proposed for c in g.cycles],
                "drafted": drafted,
                **({"by": by} if by else {}),
                "cut": [i for i, c in enumerate(g.cycles) if c.cut],
                "loop": [i for i, c in enumerate(g.cycles) if not c.cut and looping[c.start]],
                "finish": g.finish,
            }
        )
    return lines


def plain(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _per(seconds: float, count: float) -> float | None:
    return 1000 * seconds / count if count else None
