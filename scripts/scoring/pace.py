"""How long a pass takes, and which passes met a stall of the machine.

A row's speed is its tokens per pass over its seconds per pass. Tokens per pass are the
drafter's and cannot be disturbed; seconds per pass can: another program, a sleeping laptop,
a page fault. So the second factor is taken without what cannot be a pass of this row: a
pass that took more than FAR times what the slower quarter of the row's passes take, and
SLICE longer, is left out of the mean, and an answer that consists of such passes is left
out for all rows (interleaved.py asks it again first).

Two kinds of slow passes are no stalls: those of a long prompt, which is slow for every row,
and those that draft many nodes. So a pass is compared with passes that draft about as many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from outrider.decode.generation import Timing

FAR = 4.0
SLICE = 0.02  # seconds that a scheduler gives another program at once; less is any row's noise
ANY = -1  # kind of passes
ALIKE = 8  # passes that draft about as much, of which a usual one is known
Unit = tuple[str, ...]  # ids of prompts that ran together, with all their turns
Timings = Mapping[str, Mapping[Unit, Sequence[Timing]]]  # row -> unit -> its timed calls


@dataclass(frozen=True)
class Pace:
    """What one row took on one unit. seconds: of decoding without stalls, of `passes` passes
    (NaN: nothing that can be trusted). stalled: passes that are left out of both."""

    seconds: float
    passes: int
    stalled: int

    @property
    def pass_s(self) -> float:
        """Seconds of a pass; NaN where none was measured."""
        return self.seconds / self.passes if self.passes else float("nan")


def paces(timings: Timings) -> dict[str, dict[Unit, Pace]]:
    """Row -> unit -> Pace."""
    usual = {row: _usual(units) for row, units in timings.items()}
    found: dict[str, dict[Unit, Pace]] = {row: {} for row in timings}
    for unit in next(iter(timings.values()), {}):
        slow = [_middle(timings[row][unit]) / of[ANY] for row, of in usual.items() if of[ANY] > 0]
        text = max(1.0, min((s for s in slow if s == s), default=1.0))  # slow for every row
        for row, of in usual.items():
            limits = {kind: max(FAR * s * text, s + SLICE) for kind, s in of.items()}
            found[row][unit] = _pace(timings[row][unit], limits)
    return found


def stalled(found: Mapping[str, Mapping[Unit, Pace]]) -> list[Unit]:
    """Return the units of which a row has no pass that can be trusted."""
    units = next(iter(found.values()), {})
    return [u for u in units if any(r[u].stalled and not r[u].passes for r in found.values())]


def _passes(calls: Sequence[Timing]) -> list[tuple[int, float]]:
    """(kind, seconds) of every pass that is known. Those of a kind draft about as much."""
    return [
        (nodes.bit_length(), second)
        for timing in calls
        for nodes, second in zip_longest(timing.cycle_nodes, timing.cycle_s, fillvalue=0)
    ]


def _usual(units: Mapping[Unit, Sequence[Timing]]) -> dict[int, float]:
    """Kind -> seconds that the slower quarter of a row's passes take or exceed, of its calls,
    where single passes are not known (a server); under ANY those of all kinds, than which none
    has less. The lower neighbour: one call of two cannot move it."""
    calls = [timing for calls in units.values() for timing in calls]
    times = defaultdict[int, list[float]](list)
    for kind, second in _passes(calls):
        times[kind].append(second)
    every = [second for of in times.values() for second in of]
    every = every or [timing.decode_s / timing.cycles for timing in calls if timing.cycles]
    least = _slower(every)
    own = {kind: max(least, _slower(of)) for kind, of in times.items() if len(of) >= ALIKE}
    return {ANY: least, **own}


def _slower(times: Sequence[float]) -> float:
    return float(np.percentile(times, 75, method="lower")) if times else 0.0


def _middle(calls: Sequence[Timing]) -> float:
    """Return seconds of a usual pass of these calls; NaN for none."""
    times = [second for _, second in _passes(calls)]
    passes = sum(timing.cycles for timing in calls)
    if times:
        return float(np.median(times))
    return sum(timing.decode_s for timing in calls) / passes if passes else float("nan")


def _pace(calls: Sequence[Timing], limits: Mapping[int, float]) -> Pace:
    """Return the pace of one row's calls on a unit. limits: kind -> seconds above which a
    pass met a stall."""
    known = [(second, limits.get(kind, limits[ANY])) for kind, second in _passes(calls)]
    far = [second for second, limit in known if second > limit]
    passes = sum(timing.cycles for timing in calls)
    seconds = sum(timing.decode_s for timing in calls) - sum(far)
    most = sum(limit for second, limit in known if second <= limit)
    # Half of the passes, or seconds outside of them: the rest is no measurement either.
    if passes and (2 * len(far) > passes or seconds > (most if known else passes * limits[ANY])):
        return Pace(float("nan"), 0, passes)
    return Pace(seconds, passes - len(far), len(far))
