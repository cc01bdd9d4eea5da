"""Where the time of a row goes, and what would be left to win: parts of the decoding time by
decode.timing.Timing.

On a GPU the host runs ahead of the device, so the timers of the measured run say when work was
handed out, not when it was done. There a few prompts are decoded once more with a clock that
waits for the device at every part; those seconds enter no speed figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from outrider.decode.target import Target
from outrider.decode.timing import PARTS, Timing
from outrider.scripts.common.prompts import Prompt
from outrider.scripts.scoring import contest

MEASURED = "timers of the measured run"


def breakdown(
    timings: Sequence[Timing], tokens: float, speedup: float | None = None, source: str = MEASURED
) -> dict[str, Any] | None:
    """report.json's `breakdown`: seconds of decoding by part, their sum (the wall time),
    shares, milliseconds per token. tokens: what was decoded in that time. without: what
    `speedup` would be if a part took no time (`drafter`), or nothing but the target's passes
    took any (`all_but_target`). None where nothing was decoded."""
    wall = sum(t.decode_s for t in timings)
    if not tokens or wall <= 0:
        return None
    each = [t.parts() for t in timings]
    seconds = {part: sum(p[part] for p in each) for part in PARTS}
    out: dict[str, Any] = {
        "source": source,
        "wall_seconds": wall,
        "seconds": seconds,
        "share": {part: s / wall for part, s in seconds.items()},
        "ms_per_token": {part: 1000 * s / tokens for part, s in seconds.items()},
    }
    if speedup is not None:
        left = {"drafter": wall - seconds["drafter"], "all_but_target": seconds["target"]}
        out["without"] = {part: speedup * wall / s if s > 0 else None for part, s in left.items()}
    return out


def again(
    rows: Sequence[dict[str, Any]],
    target: Target,
    prompts: Sequence[Prompt],
    systems: Sequence[contest.System],
    settings: contest.ContestSettings,
) -> None:
    """Replace the `breakdown` of report.json's `rows` by that of `prompts`, decoded once more
    with a clock that waits. Rows of transformers lose theirs: their parts cannot be waited for
    from outside. So do all without `prompts`."""
    ours = [system for system in systems if system.kind != "reference"]
    waiting = dataclasses.replace(settings, wait=True)
    every: list[contest.TimedRun] = []
    if prompts:
        every = contest.run_contest(target, prompts, ours, waiting, quiet=True).timed_runs
    source = f"{len(prompts)} prompts decoded once more, waiting for the device at every part"
    for row in rows:
        timed_runs = [timed_run for timed_run in every if timed_run.drafter == row["name"]]
        tokens = sum(timed_run.decoded for timed_run in timed_runs)
        message = breakdown(
            [timed_run.timing for timed_run in timed_runs], tokens, row["speedup"]["mean"], source
        )
        row["breakdown"], row["ms_per_token"] = message, message["ms_per_token"] if message else {}
