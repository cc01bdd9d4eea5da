"""The interleaved run: every system on every prompt, taking turns so that drift of the
machine hits all alike.

For each chunk of prompts the systems run one after another, and the one that begins moves
on with every chunk. The answers of `none` become the history of later turns. A chunk on
which the machine stalled for one of them (pace.py) is asked again of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from outrider.conf.errors import UserError
from outrider.decode.checks import unfit
from outrider.decode.engine import DecodedRun, Generation, Request, Timing
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.names import NONE, DraftSpec
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import Steps
from outrider.scripts.common.prompts import Prompt, chat_ids, question_ids
from outrider.scripts.scoring import pace

WARM_UP_TOKENS = 8
AGAIN = 2  # times that a chunk is asked again at most
OFTEN = 0.1  # of the chunks; where more of them stalled, asking again would not help


@dataclass(frozen=True)
class ContestSettings:
    """What all systems share."""

    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    seed: int


@dataclass
class System:
    """A row of the table. run(requests, settings): its answers. name: as the user wrote it; label:
    short.

    server: answers elsewhere, where it may fail, and tells totals alone of what it accepted.
    target: whom it drafts for, None: the report's target. facts: what else the report says of it.
    draft: what its name asks for, None for outside references. files: name, size and time of the
    files that it drafts with.
    """

    name: str
    label: str
    kind: str
    shape: str
    depth: int
    nodes: int
    run: Callable[[Sequence[Request], ContestSettings], DecodedRun]
    server: bool = False
    target: Target | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    draft: DraftSpec | None = None
    files: list[list[Any]] = field(default_factory=list)


@dataclass
class ScoredAnswer:
    """What one drafter wrote for one turn of one prompt."""

    drafter: str
    prompt_id: str
    turn: int
    category: str
    generation: Generation


@dataclass
class TimedRun:
    """One timed call: a turn of the chunk of prompts `unit`. tokens: all; decoded: those
    behind the prefill's."""

    drafter: str
    unit: pace.Unit
    timing: Timing
    tokens: int
    decoded: int


@dataclass
class Contest:
    """What was measured, of one chunk or of all. skipped_turns: {prompt_id, turn, tokens} of
    turns that outgrew the context. lost: {name, reason} of servers that failed on the way, of
    which nothing is kept. again: chunks that were asked again, once for each time.
    """

    answers: list[ScoredAnswer] = field(default_factory=list)
    timed_runs: list[TimedRun] = field(default_factory=list)
    skipped_turns: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, str]] = field(default_factory=list)
    again: list[pace.Unit] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Contest]) -> Contest:
        """Return all chunks together."""
        lost = {one["name"]: one for part in parts for one in part.lost}
        return cls(
            [a for part in parts for a in part.answers if a.drafter not in lost],
            [t for part in parts for t in part.timed_runs if t.drafter not in lost],
            [skipped for part in parts for skipped in part.skipped_turns],
            list(lost.values()),
            [unit for part in parts for unit in part.again],
        )

    def calls(self) -> dict[str, dict[pace.Unit, list[TimedRun]]]:
        """Drafter -> chunk -> its timed calls: all turns."""
        found: dict[str, dict[pace.Unit, list[TimedRun]]] = {}
        for one in self.timed_runs:
            found.setdefault(one.drafter, {}).setdefault(one.unit, []).append(one)
        return found

    def paces(self) -> dict[str, dict[pace.Unit, pace.Pace]]:
        """Drafter -> chunk -> how fast it decoded."""
        return pace.paces(
            {
                name: {unit: [call.timing for call in calls] for unit, calls in units.items()}
                for name, units in self.calls().items()
            }
        )

    def note(
        self, name: str, unit: pace.Unit, turn: int, prompts: Sequence[Prompt], run: DecodedRun
    ) -> None:
        """Take what a system answered to a turn of a chunk."""
        tokens = first = 0
        for p, g in zip(prompts, run.generations, strict=True):
            self.answers.append(ScoredAnswer(name, p.id, turn, p.category, g))
            tokens += len(g.token_ids)
            unseen = 1 if run.timing.cycles else len(g.token_ids)  # without known cycles
            first += g.cycles[0].start if g.cycles else unseen
        self.timed_runs.append(TimedRun(name, unit, run.timing, tokens, tokens - first))


READ = TypeAdapter(Contest)


@dataclass
class Runner:
    """Measures chunks of prompts. numbers: of prompts, by id. tell: told of every call that is
    done. lost: servers that have failed so far, as in Contest."""

    target: Target
    systems: Sequence[System]
    settings: ContestSettings
    numbers: dict[str, int]
    tell: Callable[[], None]
    lost: list[dict[str, str]]

    def measure(self, number: int, chunk: Sequence[Prompt]) -> Contest:
        """Return all turns of a chunk, asked of every system."""
        part, unit = Contest(), tuple(p.id for p in chunk)
        talks: dict[str, list[dict[str, str]]] = {p.id: [] for p in chunk}
        for turn in range(max(len(p.turns) for p in chunk)):
            requests = [(p, self._request(p, turn, talks[p.id], part)) for p in chunk]
            asked = [(p, request) for p, request in requests if request is not None]
            prompts = [p for p, _ in asked]
            for k in range(len(self.systems)):
                system = self.systems[(k + number) % len(self.systems)]
                run = self.run(system, [request for _, request in asked], self.settings)
                self.tell()
                if run is None:
                    continue
                part.note(system.name, unit, turn, prompts, run)
                if system.name == NONE:  # later turns go on from its answers
                    for p, g in zip(prompts, run.generations, strict=True):
                        text = self.target.tokenizer.decode(g.token_ids, skip_special_tokens=True)
                        talks[p.id].append({"role": "assistant", "content": text})
        part.lost = list(self.lost)
        return part

    def run(
        self, system: System, requests: Sequence[Request], settings: ContestSettings
    ) -> DecodedRun | None:
        """Return what a system answers; None where nothing is asked, and for one that is
        lost. A server is beyond our power: its failure costs its own row alone, that of any
        other system is raised."""
        if not requests or any(one["name"] == system.name for one in self.lost):
            return None
        try:
            return system.run(requests, settings)
        except UserError as error:
            if not system.server:
                raise
            self.lost.append({"name": system.name, "reason": str(error)})
            return None

    def warm_up(self, prompt: Prompt) -> None:
        """Let every system decode a few tokens that nobody counts."""
        tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        few = replace(self.settings, sampling=Sampling(), max_new_tokens=tokens, batch_size=1)
        ids = question_ids(self.target.tokenizer, prompt.turns[0])
        for system in self.systems:
            self.run(system, [Request(ids, tokens)], few)

    def _request(
        self, p: Prompt, turn: int, talk: list[dict[str, str]], part: Contest
    ) -> Request | None:
        """Return what a turn asks; None where there is none, and of a prompt that has outgrown
        the context, which the part notes."""
        if turn >= len(p.turns) or len(talk) < 2 * turn:
            return None
        talk.append({"role": "user", "content": p.turns[turn]})
        ids, limit = chat_ids(self.target.tokenizer, talk), self.settings.max_new_tokens
        if unfit(self.target, len(ids), limit):
            part.skipped_turns.append({"prompt_id": p.id, "turn": turn, "tokens": len(ids)})
            return None
        return Request(ids, limit, id=request_id(self.numbers[p.id], turn))


def fitting(
    prompts: list[Prompt], target: Target, new: int, bad: list[dict[str, str]]
) -> list[Prompt]:
    """Return the prompts whose first turn fits the target's context. new: tokens of an
    answer.

    bad: takes {name, reason} of the others. Raises UserError when none fits.
    """
    kept = []
    for prompt in prompts:
        why = unfit(target, len(question_ids(target.tokenizer, prompt.turns[0])), new)
        if not why:
            kept.append(prompt)
            continue
        reason = f"prompts: {prompt.id} {why}; shorten or remove it"
        bad.append({"name": prompt.id, "reason": reason})
    if not kept:
        raise UserError(f"{bad[-1]['reason']} (and no other prompt fits)")
    return kept


def run_contest(
    target: Target,
    prompts: Sequence[Prompt],
    systems: Sequence[System],
    settings: ContestSettings,
    quiet: bool = False,
    memo: Memo | None = None,
    name: str = "contest",
) -> Contest:
    """Run every system on every prompt. Chunks of prompts that all systems have answered
    are kept in `memo` under `name`, and those that are there already are not run again: a
    chunk is what the systems are compared on, so no comparison spans a stop. A later turn
    that does not fit the context, because the history grew, is skipped for all and noted.
    """
    size, memo = settings.batch_size, memo or Memo(None)
    chunks = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    turns = [max(len(p.turns) for p in chunk) for chunk in chunks]
    # of a chunk that was asked again the last line counts
    parts = {line["number"]: READ.validate_python(line["part"]) for line in memo.lines(name)}
    numbers = {p.id: i for i, p in enumerate(prompts)}
    lost = Contest.joined(list(parts.values())).lost
    with Steps(quiet=quiet, transient=True) as progress:
        total, done = (len(systems) * sum(some) for some in (turns, turns[: len(parts)]))
        said = f"scoring, T = {settings.sampling.temperature:g}"
        task = progress.add_task(said, total=total, completed=done)

        tell = functools.partial(progress.advance, task)
        runner = Runner(target, systems, settings, numbers, tell, lost)
        if _next(parts, len(chunks)) is not None:
            runner.warm_up(prompts[0])
        while (number := _next(parts, len(chunks))) is not None:
            chunk, before = chunks[number], parts.get(number)
            if before is not None:  # asked again: more to do than was said
                total += len(systems) * turns[number]
                progress.update(task, total=total)
            parts[number] = runner.measure(number, chunk)
            if before is not None:
                parts[number].again = [*before.again, tuple(p.id for p in chunk)]
            memo.add(name, {"number": number, "part": asdict(parts[number])})
    return Contest.joined([parts[number] for number in range(len(chunks))])


def _next(parts: dict[int, Contest], count: int) -> int | None:
    """Return the number of the chunk, of `count`, that is to be asked: the first that was not,
    then one on which the machine stalled; None where there is none, or too many stalled."""
    if len(parts) < count:
        return len(parts)
    units = {*pace.stalled(Contest.joined(list(parts.values())).paces())}
    bad = [i for i, part in parts.items() if any(one.unit in units for one in part.timed_runs)]
    if len({*bad, *(i for i, part in parts.items() if part.again)}) > max(1, OFTEN * len(parts)):
        return None
    return next((i for i in bad if len(parts[i].again) < AGAIN), None)


def request_id(prompt: int, turn: int) -> int:
    """Return the id of a turn's request: different for all turns of 2**34 prompts.

    The first 64 turns count up from 64 * prompt, as they always did; later ones go far above
    those.
    """
    later, place = divmod(turn, 64)
    return (later << 40) + 64 * prompt + place
