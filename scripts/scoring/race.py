"""One prompt on which the rows of a report are seen side by side, token by token: what the race
picture and the coloured answer of report.html are drawn from.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.decode import stats
from outrider.decode.engine import Generation
from outrider.decode.text import Stream
from outrider.heads.names import NONE
from outrider.scripts.scoring.contest import Contest, ScoredAnswer, System, TimedRun

OWN = 0  # a token that the target wrote itself
Answers = dict[str, dict[str, ScoredAnswer]]  # name -> prompt id -> first answer


def race(
    report: dict[str, Any],
    contest: Contest,
    systems: Sequence[System],
    questions: Mapping[str, str],
    tokenizer: Any,
) -> dict[str, Any] | None:
    """report.json's `race`: the first turn of one prompt as every row decoded it.

    lanes: of every row of the report's own target {name, seconds of decoding, tokens, drafters,
    passes}. passes: what each target pass committed, in order, a number per token: 0 for the
    target's own, else the sum of 2**k over the drafters k that proposed it; None for servers,
    which tell totals alone. The prefill's token is in no pass. answer: [[text, number], ...] of
    `drafter`, the fastest row whose passes are known. questions: prompt id -> first turn. None
    where no such row drafts, or none decoded anything.

    The prompt is an ordinary one, not the best: among answers without a loop and at least half as
    long as the longest (all answers, where none is so) that on which the row is nearest to its
    mean over all prompts, in speed or, where prompts ran in batches, in accepted length.
    """
    own = {s.name: s for s in systems}
    first: Answers = {name: {} for name in own}
    for answer in contest.answers:
        if answer.turn == 0 and answer.drafter in own:
            first[answer.drafter][answer.prompt_id] = answer
    told = [
        row
        for row in report["drafters"]
        if row["name"] in own and row["shape"] != NONE and row["speedup"]["mean"] is not None
        if not own[row["name"]].facts.get("totals_alone")
    ]
    best = max(told, key=lambda row: row["speedup"]["mean"], default=None)
    prompt = None if best is None else _ordinary(best, first)
    if best is None or prompt is None:
        return None
    known = {
        (run.drafter, p): run for run in contest.timed_runs if not run.turn for p in run.prompts
    }
    generation = first[best["name"]][prompt].generation
    return {
        "prompt_id": prompt,
        "category": first[best["name"]][prompt].category,
        "question": questions[prompt],
        "drafter": best["name"],
        "lanes": [
            _lane(system, first[name][prompt].generation, known[name, prompt])
            for name, system in own.items()
            if len(first[name][prompt].generation.token_ids) > 1
        ],
        "answer": _coloured(generation, tokenizer),
    }


def _ordinary(row: dict[str, Any], first: Answers) -> str | None:
    """The prompt to show for a row."""
    mine = {
        prompt: answer.generation
        for prompt, answer in first[row["name"]].items()
        if len(answer.generation.token_ids) > 1
    }
    if not mine:
        return None
    longest = max(len(generation.token_ids) for generation in mine.values())
    fit = [
        prompt
        for prompt, generation in mine.items()
        if not stats.split(generation).loop and 2 * len(generation.token_ids) >= longest
    ]
    cells = {cell["prompt_id"]: cell for cell in row["per_prompt"]}
    timed = any(cell["speedup"] is not None for cell in cells.values())
    key = "speedup" if timed else "accepted_length"

    def distance(prompt: str) -> float:
        value = cells[prompt][key]
        return float("inf") if value is None else abs(value - row[key]["mean"])

    return min(fit or mine, key=distance)


def _passes(generation: Generation) -> list[list[int]]:
    """What each pass committed, see `race`."""
    return [
        [
            (cycle.drafters[i] if cycle.drafters else 1) if i < cycle.accepted else OWN
            for i in range(end - cycle.start)
        ]
        for cycle, end in stats.passes(generation)
    ]


def _lane(system: System, generation: Generation, run: TimedRun) -> dict[str, Any]:
    """What a row did. Prompts that ran together share the time of their passes."""
    silent = system.facts.get("totals_alone", False)
    share = 1.0
    if len(run.prompts) > 1 and run.timing.cycles:
        share = min(1.0, len(generation.cycles) / run.timing.cycles)
    return {
        "name": system.name,
        "seconds": run.timing.decode_s * share,
        "tokens": len(generation.token_ids),
        "drafters": system.facts.get("parts") or [system.name],
        "passes": None if silent else _passes(generation),
    }


def _coloured(generation: Generation, tokenizer: Any) -> list[list[Any]]:
    """[text, who] in runs of one who. A character of several tokens counts as its last one's."""
    behind = list(itertools.chain(*_passes(generation)))
    by = [OWN] * (len(generation.token_ids) - len(behind)) + behind
    stream, runs = Stream(tokenizer), list[list[Any]]()
    pieces = [
        (stream.push(token), who) for token, who in zip(generation.token_ids, by, strict=True)
    ]
    for text, who in [*pieces, (stream.rest(), by[-1])]:
        if text and runs and runs[-1][1] == who:
            runs[-1][0] += text
        elif text:
            runs.append([text, who])
    return runs
