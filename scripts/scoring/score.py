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
from outrider.decode.engine import Cycle, Timing
from outrider.heads.names import NONE
from outrider.scripts.scoring import pace
from outrider.scripts.scoring.breakdown import breakdown
from outrider.scripts.scoring.contest import Contest, ScoredAnswer, System
from outrider.scripts.scoring.pace import Unit

FEW = 5  # timed units; the bootstrap of fewer says little
WIDE = 0.5  # of a speed: an interval beyond that is no measurement
LEAST = 0.97  # of a plain pass, that a cycle with a draft takes
SURE = 0.9  # of a plain pass: the noise of a quiet machine does not explain less
REPORTED = ("trained_for", "weights_sha256", "hub")  # of a system's facts, where they are known


class Scores:
    """The contest, indexed by drafter and prompt."""

    def __init__(self, contest: Contest, systems: Sequence[System], seed: int = 0) -> None:
        self.seed, self.systems = seed, list(systems)
        # servers that do not say what they accepted: of their cycles nothing is known
        self.silent = {system.name for system in systems if not system.facts.get("tells", True)}
        self.answers: dict[str, dict[str, list[ScoredAnswer]]] = {
            system.name: {} for system in systems
        }
        for answer in contest.answers:
            self.answers[answer.drafter].setdefault(answer.prompt_id, []).append(answer)
        names = [system.name for system in systems]
        self.timed_runs, self.paces = contest.calls(names), contest.paces(names)
        self.again = contest.again
        self.left_out = set(pace.stalled(self.paces))
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

    def units(self, category: str | None = None) -> list[Unit]:
        """The timed units whose prompts are all of `category` (None: every unit)."""
        units = next(iter(self.timed_runs.values()), {})
        return [
            u for u in units if category is None or all(self.category[p] == category for p in u)
        ]

    def work(self, name: str, units: Sequence[Unit], whole: bool = False) -> stats.Work:
        """What a row did on these units: decoding alone (the prefill's token is not its
        work), or end to end."""
        tokens, passes, pass_s = [], [], []
        for unit in units:
            calls, took = self.timed_runs[name][unit], self.paces[name][unit]
            count = sum(call.timing.cycles for call in calls)
            each = float("nan") if unit in self.left_out else took.pass_s
            if whole and count:
                each += sum(call.timing.prefill_s for call in calls) / count
            tokens.append(float(sum(call.tokens if whole else call.decoded for call in calls)))
            passes.append(float(count))
            pass_s.append(each)
        return stats.Work(tokens, passes, pass_s)

    def speedup(self, a: str, b: str, units: Sequence[Unit], whole: bool = False) -> dict[str, Any]:
        """Tokens per second of `a` over those of `b`, paired by unit."""
        work, base = (self.work(name, units, whole) for name in (a, b))
        return plain(stats.speedup(work, base, self.seed).json())  # type: ignore[no-any-return]

    def undisturbed(self, name: str) -> list[list[Timing]]:
        """[unit][call]: of a row the units in which no pass met a stall."""
        units = [unit for unit, took in self.paces[name].items() if not took.stalled]
        return [[call.timing for call in self.timed_runs[name][unit]] for unit in units]

    def cycle_ms(self, name: str, phases: Sequence[str]) -> dict[str, Any]:
        """Milliseconds per cycle spent in `phases`, resampled by unit."""
        calls = self.undisturbed(name)
        spent = [1000 * sum(getattr(t, f"{p}_s") for t in unit for p in phases) for unit in calls]
        passes = [float(sum(t.cycles for t in unit)) for unit in calls]
        return plain(stats.trimmed_interval(spent, passes, self.seed).json())  # type: ignore[no-any-return]

    def break_even(self, system: System, units: Sequence[Unit]) -> stats.Interval | None:
        """Accepted length at which the drafter's cycles, as long as they were, would be as
        fast as plain decoding.
        """
        mine, base = self.work(system.name, units), self.work(NONE, units)
        passes, plain_passes, plain_tokens = map(sum, (mine.passes, base.passes, base.tokens))
        if not system.nodes or not passes or not plain_passes or not plain_tokens:
            return None
        answers = [a for u in units for p in u for a in self.answers[system.name][p]]
        cycles = sum(len(a.generation.cycles) for a in answers)
        rows = cycles / passes if cycles else 1.0  # that a target pass serves on average
        longer = stats.pass_ratio(mine, base, self.seed)
        return longer.times(plain_tokens / plain_passes / rows)

    def doubts(self, system: System, speed: dict[str, Any], units: Sequence[Unit]) -> list[str]:
        """Why the speed of a row cannot be believed, a sentence each; [] where it can."""
        mean, low, high = (speed[key] for key in ("mean", "low", "high"))
        if mean is None or system.name == NONE:
            return []
        found = []
        both = np.array([self.work(name, units).pass_s for name in (system.name, NONE)])
        timed = int(np.isfinite(both).all(0).sum())
        if timed < FEW:
            found.append(f"it rests on {timed} timed prompts (or batches of them), less than {FEW}")
        if low is not None and high - low > WIDE * mean:
            found.append(f"its interval is wider than {WIDE:g} of it")
        limit = self.break_even(system, units)
        if limit is None or system.kind == "reference":  # another engine has passes of its own
            return found
        share = self._target_share()
        if limit.mean < min(share, SURE):
            found.append(
                f"it is faster than its accepted length allows: {limit.mean:.2f} plain passes a "
                f"cycle, of which the target alone takes {share:.2f}"
            )
        elif limit.high is not None and limit.high < LEAST:
            found.append(f"a cycle that drafts seems shorter ({limit.mean:.2f}) than a plain one")
        return found

    def _target_share(self) -> float:
        """The share of a plain cycle that the target takes, which no drafter can go below."""
        timings = [t for unit in self.undisturbed(NONE) for t in unit if t.decode_s > 0]
        shares = [t.target_s / t.decode_s for t in timings]
        return float(np.median(shares)) if shares else 0.0

    def stalls(self) -> dict[str, Any]:
        """What the machine's stalls cost: of how many timed units those that were timed
        again and those that are left out of all times; passes left out, by row."""
        passes = {name: sum(p.stalled for p in of.values()) for name, of in self.paces.items()}
        return {
            "units": len(self.units()),
            "timed_again": [list(unit) for unit in dict.fromkeys(self.again)],
            "left_out": [list(unit) for unit in self.units() if unit in self.left_out],
            "passes": {name: count for name, count in passes.items() if count},
        }

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
                "parameters": system.facts.get("parameters"),
                "bytes": system.facts.get("bytes"),
                "training": system.facts.get("training"),
                **{k: v for k, v in system.facts.items() if k in REPORTED},
                **self._parts(system, [c for cycles in clean for c in cycles]),
                **self._times(system, speed),
                "per_prompt": [
                    self._prompt(system, p, cycles)
                    for p, cycles in zip(self.prompts, clean, strict=True)
                ],
                "units": [self._unit(system.name, unit) for unit in units],
            }
        )

    def _unit(self, name: str, unit: Unit) -> dict[str, Any]:
        """What was timed: tokens and seconds of decoding as measured; stalled: passes left
        out."""
        calls, took = self.timed_runs[name][unit], self.paces[name][unit]
        return {
            "prompts": list(unit),
            "tokens": float(sum(call.decoded for call in calls)),
            "seconds": sum(call.timing.decode_s for call in calls),
            "passes": sum(call.timing.cycles for call in calls),
            "stalled": took.stalled,
        }

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

    def _speed(self, system: System, units: Sequence[Unit]) -> dict[str, Any]:
        """Tokens per second, and against plain decoding."""
        name = system.name
        alone, whole = (stats.rate(self.work(name, units, end), self.seed) for end in (False, True))
        speed = self.speedup(name, NONE, units)
        limit = self.break_even(system, units)
        return {
            "tokens_per_second": alone.mean,
            "tokens_per_second_interval": alone.json(),
            "speedup": speed,
            "doubts": self.doubts(system, speed, units),
            "end_to_end": {
                "tokens_per_second": whole.mean,
                "speedup": self.speedup(name, NONE, units, whole=True),
            },
            "break_even": None if limit is None else limit.mean,
        }

    def _times(self, system: System, speed: dict[str, Any]) -> dict[str, Any]:
        """Peak memory, and where the time of a cycle goes, stalls left out. speed: of `_speed`."""
        rate, speedup = speed["tokens_per_second"], speed["speedup"]["mean"]
        name = system.name
        calls = [call for of in self.timed_runs[name].values() for call in of]
        steady = [unit for unit, took in self.paces[name].items() if not took.stalled]
        decoded = sum(self.work(name, steady).tokens)
        outside = system.facts.get("totals_alone", False)  # a server
        timings = [timing for unit in self.undisturbed(name) for timing in unit]
        parts = None if outside else breakdown(timings, decoded, speedup)
        if parts and rate:  # a slow answer has its say in shares alone, as in the row's speed
            parts["ms_per_token"] = {k: 1000 * s / rate for k, s in parts["share"].items()}
        draft, verify, target = (
            self.cycle_ms(name, phases)
            for phases in (("draft",), ("target", "verify", "commit"), ("target",))
        )
        inside = {  # what is seen in this process alone
            "peak_bytes": max((call.peak or 0 for call in calls), default=0) or None,
            "draft_ms_interval": draft,
            "verify_ms_interval": verify,
            "draft_ms": draft["mean"],
            "verify_ms": verify["mean"],
            "target_ms": target["mean"],
            "target_passes": sum(call.timing.cycles for call in calls),
        }
        return {
            **(dict.fromkeys(inside) if outside else inside),
            "prefill_seconds": sum(call.timing.prefill_s for call in calls),
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
            "tokens_per_second": stats.rate(self.work(name, units), self.seed).mean,
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
    """The lines of outputs.jsonl. drafted: accepted draft tokens, the first ones of what
    each of `cycles` committed. by: of a union, who proposed each of them, bit k for its
    k-th drafter. cut, loop: places in `cycles` of those that are counted apart.
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
