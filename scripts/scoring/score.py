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
from outrider.decode.records import PARTS
from outrider.heads.names import NONE
from outrider.scripts.scoring import pace
from outrider.scripts.scoring.interleaved import Contest, ScoredAnswer, System
from outrider.scripts.scoring.pace import Unit
from outrider.scripts.scoring.ranking import ranking

FEW = 5  # timed units; the bootstrap of fewer says little
WIDE = 0.5  # of a speed: an interval beyond that is no measurement
LEAST = 0.97  # of a plain pass, that a cycle with a draft takes
SURE = 0.9  # of a plain pass: the noise of a quiet machine does not explain less
REPORTED = ("trained_for", "weights_sha256", "hub")  # of a system's facts, where they are known
MEASURED = "timers of the measured run"


class Scores:
    """The contest, indexed by drafter and prompt. Systems that were lost are left out."""

    def __init__(self, contest: Contest, systems: Sequence[System], seed: int = 0) -> None:
        lost = {one["name"] for one in contest.lost}
        self.contest, self.seed = contest, seed
        self.systems = [system for system in systems if system.name not in lost]
        names = [system.name for system in self.systems]
        self.answers: dict[str, dict[str, list[ScoredAnswer]]] = {name: {} for name in names}
        self.category: dict[str, str] = {}
        for answer in contest.answers:
            self.answers[answer.drafter].setdefault(answer.prompt_id, []).append(answer)
            self.category[answer.prompt_id] = answer.category
        self.timed_runs, self.paces = contest.calls(names), contest.paces(names)
        self.left_out = set(pace.stalled(self.paces))
        self.prompts = list(self.answers[names[0]])

    def report(self, lossless: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What report.json says of the drafters. lossless: of `same_tokens`, by drafter."""
        rows = [{**self.row(s), "lossless": lossless.get(s.name)} for s in self.systems]
        pairs = self.pairs({row["name"]: row["doubts"] for row in rows})
        return {
            "drafters": rows,
            "pairs": pairs,
            "stalls": self.stalls(),
            "skipped": self.contest.lost,
            "skipped_turns": self.contest.skipped_turns,
            "sittings": self.contest.sittings,
            "ranking": ranking(rows, pairs),
        }

    def clean(self, name: str, prompts: Sequence[str]) -> list[list[Cycle]]:
        """[prompt][cycle]: the cycles that count; none of a server that does not say what it
        accepted."""
        if name in self.contest.silent:
            return [[] for _ in prompts]
        answers = self.answers[name]
        return [[c for a in answers[p] for c in stats.split(a.generation).clean] for p in prompts]

    def units(self, category: str | None = None) -> list[Unit]:
        """The timed units whose prompts are all of `category` (None: every unit)."""
        units = next(iter(self.timed_runs.values()), {})
        return [
            u for u in units if category is None or {self.category.get(p) for p in u} == {category}
        ]

    def work(self, name: str, units: Sequence[Unit], whole: bool = False) -> stats.Work:
        """What a row did on these units: decoding alone (the prefill's token is not its
        work), or end to end."""
        tokens, passes, pass_s = [], [], []
        for unit in units:
            calls = self.timed_runs[name][unit]
            count = sum(call.timing.cycles for call in calls)
            each = float("nan") if unit in self.left_out else self.paces[name][unit].pass_s
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
        answers = [a for u in units for p in u for a in self.answers[system.name].get(p, ())]
        cycles = sum(len(a.generation.cycles) for a in answers)
        rows = cycles / passes if cycles else 1.0  # that a target pass serves on average
        longer = stats.pass_ratio(mine, base, self.seed)
        return longer.times(plain_tokens / plain_passes / rows)

    def ratio_doubts(self, ratio: dict[str, Any], names: Sequence[str], units: Any) -> list[str]:
        """Why a ratio of speeds of two rows cannot be believed, whatever they draft; [] where
        it can."""
        mean, low, high = (ratio[key] for key in ("mean", "low", "high"))
        both = np.array([self.work(name, units).pass_s for name in names])
        timed = int(np.isfinite(both).all(0).sum())
        found = []
        if timed < FEW:
            found.append(f"it rests on {timed} timed prompts (or batches of them), less than {FEW}")
        if low is not None and high - low > WIDE * mean:
            found.append(f"its interval is wider than {WIDE:g} of it")
        return found

    def doubts(self, system: System, speed: dict[str, Any], units: Sequence[Unit]) -> list[str]:
        """Why the speed of a row cannot be believed, a sentence each; [] where it can."""
        if speed["mean"] is None or system.name == NONE:
            return []
        found = self.ratio_doubts(speed, (system.name, NONE), units)
        limit = self.break_even(system, units)
        if limit is None or system.kind == "reference":  # another engine has passes of its own
            return found
        timings = [t for unit in self.undisturbed(NONE) for t in unit if t.decode_s > 0]
        # of a plain cycle the target takes this, which no drafter can go below
        share = float(np.median([t.target_s / t.decode_s for t in timings])) if timings else 0.0
        if limit.mean < min(share, SURE):
            found.append(
                f"it is faster than its accepted length allows: {limit.mean:.2f} plain passes a "
                f"cycle, of which the target alone takes {share:.2f}"
            )
        elif limit.high is not None and limit.high < LEAST:
            found.append(f"a cycle that drafts seems shorter ({limit.mean:.2f}) than a plain one")
        return found

    def stalls(self) -> dict[str, Any]:
        """What the machine's stalls cost: of how many timed units those that were timed
        again and those that are left out of all times; passes left out, by row."""
        passes = {name: sum(p.stalled for p in of.values()) for name, of in self.paces.items()}
        return {
            "units": len(self.units()),
            "timed_again": [list(unit) for unit in dict.fromkeys(self.contest.again)],
            "left_out": [list(unit) for unit in self.units() if unit in self.left_out],
            "passes": {name: count for name, count in passes.items() if count},
        }

    def row(self, system: System) -> dict[str, Any]:
        """One entry of report.json's `drafters`."""
        clean = self.clean(system.name, self.prompts)
        speed = self._speed(system)
        return plain(  # type: ignore[no-any-return]
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
            }
        )

    def _accepted(self, system: System, clean: list[list[Cycle]]) -> dict[str, Any]:
        """What was written and accepted. clean: the cycles of every prompt that count."""
        answers, name = self.answers[system.name], system.name
        flat = [c for cycles in clean for c in cycles]
        known = [] if name in self.contest.silent else [a for p in answers for a in answers[p]]
        splits = [stats.split(a.generation) for a in known]
        cut, loop = ([c for s in splits for c in getattr(s, key)] for key in ("cut", "loop"))
        everything = [[c for a in answers[p] for c in a.generation.cycles] for p in self.prompts]
        totals = system.facts.get("totals_alone", False)
        return {
            "tokens": sum(len(a.generation.token_ids) for p in answers for a in answers[p]),
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
            "accepted_length_all_cycles": stats.accepted_length(
                everything if known else [], self.seed
            ).json(),
            "by_category": {
                c: self._category(system, c) for c in sorted(set(self.category.values()))
            },
        }

    def _speed(self, system: System) -> dict[str, Any]:
        """Tokens per second, and against plain decoding."""
        name, units = system.name, self.units()
        alone, whole = (stats.rate(self.work(name, units, end), self.seed) for end in (False, True))
        speed = self.speedup(name, NONE, units)
        limit = self.break_even(system, units)
        return {
            "tokens_per_second": alone.mean,
            "speedup": speed,
            "doubts": self.doubts(system, speed, units),
            "end_to_end": {
                "tokens_per_second": whole.mean,
                "speedup": self.speedup(name, NONE, units, whole=True),
            },
            "break_even": None if limit is None else limit.mean,
        }

    def _times(self, system: System, speed: dict[str, Any]) -> dict[str, Any]:
        """Peak memory, and where the time of a cycle goes, stalls left out. speed: of
        `_speed`."""
        name = system.name
        calls = [call for of in self.timed_runs[name].values() for call in of]
        outside = system.facts.get("totals_alone", False)  # a server
        timings = [timing for unit in self.undisturbed(name) for timing in unit]
        parts = None if outside else breakdown(timings, plain(speed))
        draft = self.cycle_ms(name, ("draft",))
        verify = self.cycle_ms(name, ("target", "verify", "commit"))
        inside = {  # what is seen in this process alone
            "peak_bytes": max((call.peak or 0 for call in calls), default=0) or None,
            "draft_ms_interval": draft,
            "verify_ms_interval": verify,
            "draft_ms": draft["mean"],
            "verify_ms": verify["mean"],
            "target_passes": sum(call.timing.cycles for call in calls),
        }
        return {
            **(dict.fromkeys(inside) if outside else inside),
            "ms_per_token": parts["ms_per_token"] if parts else {},
            "breakdown": parts,
        }

    def _parts(self, system: System, flat: list[Cycle]) -> dict[str, Any]:
        """Who of a union proposed what was accepted; {} for a single drafter."""
        parts = system.facts.get("parts", [])
        counts = zip(parts, stats.acceptance_by_drafter(flat, len(parts)), strict=True)
        rows = [{"name": n, "accepted": count, "alone": alone} for n, (count, alone) in counts]
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
        name, units = system.name, self.units(category)
        prompts = [p for p in self.prompts if self.category[p] == category]
        clean = self.clean(name, prompts)
        speed = self.speedup(name, NONE, units) if units else None
        return {
            "prompts": len(prompts),
            "cycles": sum(map(len, clean)),
            "accepted_length": stats.accepted_length(clean, self.seed).json(),
            "tokens_per_second": stats.rate(self.work(name, units), self.seed).mean,
            "speedup": speed,
            "doubts": self.doubts(system, speed, units) if speed else [],
        }

    def pairs(self, doubts: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Paired differences of accepted length between drafters that draft, and speed ratios
        between all. doubts: of every row.
        """
        out, units = [], self.units()
        for a, b in itertools.combinations(self.systems, 2):
            ratio = self.speedup(a.name, b.name, units)
            why = [f"the speed of {s.label} is in doubt" for s in (a, b) if doubts[s.name]]
            if ratio["mean"] is not None:
                why += self.ratio_doubts(ratio, (a.name, b.name), units)
            pair = {"a": a.name, "b": b.name, "speed_ratio": ratio, "doubts": why}
            if a.nodes and b.nodes:
                mine, theirs = (self.clean(system.name, self.prompts) for system in (a, b))
                difference = stats.paired_difference(mine, theirs, self.seed)
                pair["accepted_length_difference"] = plain(difference.json())
            out.append(pair)
        return out


def breakdown(timings: Sequence[Timing], speed: dict[str, Any]) -> dict[str, Any] | None:
    """Where the time of a row goes: seconds of decoding by part, their sum (the wall time),
    shares, milliseconds per token at the row's speed. without: what the speedup would be if
    a part took no time (`drafter`), or nothing but the target's passes took any
    (`all_but_target`). None where nothing was decoded."""
    wall, rate, speedup = (
        sum(t.decode_s for t in timings),
        speed["tokens_per_second"],
        speed["speedup"],
    )
    if wall <= 0 or not rate:
        return None
    each = [t.parts() for t in timings]
    seconds = {part: sum(p[part] for p in each) for part in PARTS}
    out: dict[str, Any] = {
        "source": MEASURED,
        "wall_seconds": wall,
        "seconds": seconds,
        "share": {part: s / wall for part, s in seconds.items()},
        "ms_per_token": {part: 1000 * s / wall / rate for part, s in seconds.items()},
    }
    if speedup["mean"] is not None:
        left = {"drafter": wall - seconds["drafter"], "all_but_target": seconds["target"]}
        mean = speedup["mean"]
        out["without"] = {part: mean * wall / s if s > 0 else None for part, s in left.items()}
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
