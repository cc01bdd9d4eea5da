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
from outrider.heads.names import NONE
from outrider.scripts.scoring import pace
from outrider.scripts.scoring.interleaved import Contest, ScoredAnswer, System
from outrider.scripts.scoring.ranking import ranking

FEW = 5  # timed units; the bootstrap of fewer says little
WIDE = 0.5  # of a speed: an interval beyond that is no measurement
LEAST = 0.97  # of a plain pass, that a cycle with a draft takes
VERIFY = ("target", "verify", "commit")  # phases of a pass that are not the drafter's
REPORTED = ("trained_for", "weights_sha256", "hub")  # of a system's facts, where they are known


class Scores:
    """The contest, indexed by drafter and prompt. Systems that were lost are left out."""

    def __init__(self, contest: Contest, systems: Sequence[System]) -> None:
        lost = {one["name"] for one in contest.lost}
        self.contest = contest
        self.systems = [system for system in systems if system.name not in lost]
        first = self.systems[0].name
        self.answers: dict[str, dict[str, list[ScoredAnswer]]] = {}
        self.category: dict[str, str] = {}
        for answer in contest.answers:
            of = self.answers.setdefault(answer.drafter, {})
            of.setdefault(answer.prompt_id, []).append(answer)
            self.category[answer.prompt_id] = answer.category
        self.timed_runs, self.paces = contest.calls(), contest.paces()
        self.left_out = set(pace.stalled(self.paces))
        self.units, self.prompts = [*self.timed_runs[first]], [*self.answers[first]]

    def report(self, lossless: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return what report.json says of the drafters. lossless: of `same_tokens`, by drafter."""
        rows = [{**self.row(s), "lossless": lossless.get(s.name)} for s in self.systems]
        pairs = self.pairs({row["name"]: row["doubts"] for row in rows})
        return {
            "drafters": rows,
            "pairs": pairs,
            "stalls": self.stalls(),
            "skipped": self.contest.lost,
            "skipped_turns": self.contest.skipped_turns,
            "ranking": ranking(rows, pairs),
        }

    def work(self, name: str, whole: bool = False) -> stats.Work:
        """Return what a row did by unit: decoding alone (the prefill's token is not its
        work), or end to end."""
        tokens, passes, pass_s = [], [], []
        for unit in self.units:
            calls = self.timed_runs[name][unit]
            count = sum(call.timing.cycles for call in calls)
            each = float("nan") if unit in self.left_out else self.paces[name][unit].pass_s
            if whole and count:
                each += sum(call.timing.prefill_s for call in calls) / count
            tokens.append(float(sum(call.tokens if whole else call.decoded for call in calls)))
            passes.append(float(count))
            pass_s.append(each)
        return stats.Work(tokens, passes, pass_s)

    def speedup(self, a: str, b: str, whole: bool = False) -> dict[str, Any]:
        """Return tokens per second of `a` over those of `b`, paired by unit."""
        work, base = (self.work(name, whole) for name in (a, b))
        return plain(stats.speedup(work, base).json())  # type: ignore[no-any-return]

    def phase_ms(self, name: str, phases: Sequence[str]) -> float | None:
        """Milliseconds per target pass spent in `phases`, over the units without a stall."""
        units = [unit for unit, took in self.paces[name].items() if not took.stalled]
        calls = [[call.timing for call in self.timed_runs[name][unit]] for unit in units]
        passes = np.array([sum(t.cycles for t in of) for of in calls], float)
        spent = np.array([sum(getattr(t, f"{p}_s") for t in of for p in phases) for of in calls])
        known = passes > 0
        if not known.any():
            return None
        return 1000 * float(stats.trimmed(spent[known] / passes[known], passes[known]))

    def break_even(self, system: System) -> stats.Interval | None:
        """Return accepted length at which the drafter's cycles, as long as they were, would
        be as fast as plain decoding."""
        mine, base = self.work(system.name), self.work(NONE)
        passes, plain_passes, plain_tokens = map(sum, (mine.passes, base.passes, base.tokens))
        if not system.nodes or not passes or not plain_passes or not plain_tokens:
            return None
        answers = [a for of in self.answers[system.name].values() for a in of]
        cycles = sum(len(a.generation.cycles) for a in answers)
        rows = cycles / passes if cycles else 1.0  # that a target pass serves on average
        return stats.pass_ratio(mine, base).times(plain_tokens / plain_passes / rows)

    def few(self, names: Sequence[str]) -> list[str]:
        """Return why a ratio of two rows' speeds rests on too little; [] where it does not."""
        both = np.array([self.work(name).pass_s for name in names])
        timed = int(np.isfinite(both).all(0).sum())
        said = f"the speed rests on fewer than {FEW} timed prompts or batches of them ({timed})"
        return [said] if timed < FEW else []

    def doubts(self, system: System, speed: dict[str, Any]) -> list[str]:
        """Return why the speed of a row cannot be believed, a sentence each; [] where it can."""
        mean, low, high = (speed[key] for key in ("mean", "low", "high"))
        if mean is None or system.name == NONE:
            return []
        found, limit = self.few((system.name, NONE)), self.break_even(system)
        if low is not None and high - low > WIDE * mean:
            found.append(f"the 95 % interval is wider than {WIDE:g} of the speed")
        if limit is not None and limit.high is not None and limit.high < LEAST:
            found.append(f"a cycle that drafts seems shorter ({limit.mean:.2f}) than a plain one")
        return found

    def stalls(self) -> dict[str, Any]:
        """Return what the machine's stalls cost: of how many timed units those that were
        timed again and those that are left out of all times; passes left out, by row."""
        passes = {name: sum(p.stalled for p in of.values()) for name, of in self.paces.items()}
        return {
            "units": len(self.units),
            "timed_again": [list(unit) for unit in dict.fromkeys(self.contest.again)],
            "left_out": [list(unit) for unit in self.units if unit in self.left_out],
            "passes": {name: count for name, count in passes.items() if count},
        }

    def row(self, system: System) -> dict[str, Any]:
        """Return one entry of report.json's `drafters`."""
        about = {
            "name": system.name,
            "kind": system.kind,
            "shape": system.shape,
            "label": system.label,
            "max_depth": system.depth,
            "max_nodes": system.nodes,
        }
        known = {key: value for key, value in system.facts.items() if key in REPORTED}
        return plain({**about, **self._accepted(system), **self._speed(system), **known})  # type: ignore[no-any-return]

    def _accepted(self, system: System) -> dict[str, Any]:
        """Return what was written and accepted."""
        answers = self.answers[system.name]
        splits = {p: [stats.split(a.generation) for a in answers[p]] for p in self.prompts}
        clean = {p: [c for split in of for c in split.clean] for p, of in splits.items()}
        cut, loop = (
            [c for of in splits.values() for split in of for c in getattr(split, key)]
            for key in ("cut", "loop")
        )
        every = [[c for a in answers[p] for c in a.generation.cycles] for p in self.prompts]
        by_category = {}
        for category in sorted({*self.category.values()}):
            of = [clean[p] for p in self.prompts if self.category[p] == category]
            by_category[category] = {
                "prompts": len(of),
                "cycles": sum(map(len, of)),
                "accepted_length": stats.accepted_length(of).json(),
            }
        return {
            "tokens": sum(len(a.generation.token_ids) for p in answers for a in answers[p]),
            "cycles": sum(map(len, clean.values())),
            "accepted_length": stats.accepted_length(clean.values()).json(),
            "acceptance_by_position": []
            if system.server
            else [place.json() for place in stats.acceptance_by_position([*clean.values()])],
            "cut_cycles": {
                "cycles": len(cut),
                "draft_tokens_accepted": sum(c.accepted for c in cut),
            },
            "loop_cycles": {
                "cycles": len(loop),
                "accepted_length": stats.accepted_length([loop]).mean,
            },
            "accepted_length_all_cycles": stats.accepted_length(every).json(),
            "by_category": by_category,
        }

    def _speed(self, system: System) -> dict[str, Any]:
        """Return tokens per second, against plain decoding, and what a cycle takes."""
        name, limit = system.name, self.break_even(system)
        alone, whole = (self._rated(name, end) for end in (False, True))
        return {
            **alone,
            "doubts": self.doubts(system, alone["speedup"]),
            "end_to_end": whole,
            "break_even": None if limit is None else limit.mean,
            "draft_ms": None if system.kind == "reference" else self.phase_ms(name, ["draft"]),
            "verify_ms": None if system.server else self.phase_ms(name, VERIFY),
        }

    def _rated(self, name: str, whole: bool) -> dict[str, Any]:
        """Return a row's speed against plain decoding, and its tokens per second: plain
        decoding's times that. A rate of its own would say otherwise wherever the machine was not
        equally fast all the time, for the speedup is paired."""
        speed = self.speedup(name, NONE, whole)
        rate = stats.rate(self.work(NONE, whole)).mean
        paired = float("nan") if speed["mean"] is None else rate * speed["mean"]
        return {"tokens_per_second": paired, "speedup": speed}

    def pairs(self, doubts: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Return the ratio of speeds of every two rows, and why it tells no order. doubts: of
        every row."""
        out = []
        for a, b in itertools.combinations((system.name for system in self.systems), 2):
            why = [f"the speed of {name} is in doubt" for name in (a, b) if doubts[name]]
            why += self.few((a, b))
            out.append({"a": a, "b": b, "speed_ratio": self.speedup(a, b), "doubts": why})
        return out


def output_lines(contest: Contest) -> list[dict[str, Any]]:
    """Return the lines of outputs.jsonl: every answer, and how many of its tokens each of its
    cycles committed: fewer than accepted + 1 where a stop token or the limit cut it."""
    lines = []
    for a in contest.answers:
        g = a.generation
        starts = [*(c.start for c in g.cycles), len(g.token_ids)]
        lines.append(
            {
                "drafter": a.drafter,
                "prompt_id": a.prompt_id,
                "turn": a.turn,
                "category": a.category,
                "prompt_ids": list(g.prompt_ids),
                "token_ids": g.token_ids,
                "cycles": [end - start for start, end in itertools.pairwise(starts)],
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
