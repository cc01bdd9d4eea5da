"""The interleaved run: every system on every prompt, taking turns so that drift of the
machine hits all alike.

For each chunk of prompts the systems run one after another, and the one that begins moves
on with every chunk. The answers of `none` become the history of later turns. A chunk on
which the machine stalled for one of them (pace.py) is asked again of all.
"""

from __future__ import annotations

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
from outrider.scripts.common.names import clipped
from outrider.scripts.common.progress import Steps, columns
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
    """A row of the table. run(requests, settings): its answers. name: as the user wrote it,
    made unique; label: short.

    target: whom it drafts for, None: the report's target. facts: parameters, bytes, training
    cost, where known. draft: what its name asks for, None for outside references. files: name,
    size and time of the files that it drafts with.
    """

    name: str
    label: str
    kind: str
    shape: str
    depth: int
    nodes: int
    run: Callable[[Sequence[Request], ContestSettings], DecodedRun]
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
    """What was measured, of one chunk or of all. skipped_turns: {prompt_id, turn, tokens}
    of turns that no system could run. lost: {name, reason} of servers that failed on the
    way, of which nothing is kept. silent: servers that do not say what they accepted.
    again: chunks that were asked again, once for each time.
    """

    answers: list[ScoredAnswer] = field(default_factory=list)
    timed_runs: list[TimedRun] = field(default_factory=list)
    skipped_turns: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, str]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
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
            list(dict.fromkeys(name for part in parts for name in part.silent)),
            [unit for part in parts for unit in part.again],
        )

    def calls(self, drafters: Sequence[str]) -> dict[str, dict[pace.Unit, list[TimedRun]]]:
        """Drafter -> chunk -> its timed calls: all turns."""
        found: dict[str, dict[pace.Unit, list[TimedRun]]] = {name: {} for name in drafters}
        for one in self.timed_runs:
            if one.drafter in found:
                found[one.drafter].setdefault(one.unit, []).append(one)
        return found

    def paces(self, drafters: Sequence[str]) -> dict[str, dict[pace.Unit, pace.Pace]]:
        """Drafter -> chunk -> how fast it decoded."""
        found: dict[str, dict[pace.Unit, list[Timing]]] = {}
        for name, units in self.calls(drafters).items():
            found[name] = {unit: [call.timing for call in calls] for unit, calls in units.items()}
        return pace.paces(found)

    def note(self, name: str, chunk: Sequence[Prompt], asked: Asked, run: DecodedRun) -> None:
        """Take what a system answered to a turn of a chunk."""
        tokens = sum(len(g.token_ids) for g in run.generations)
        first = sum(g.cycles[0].start if g.cycles else len(g.token_ids) for g in run.generations)
        unit = tuple(p.id for p in chunk)
        self.timed_runs.append(TimedRun(name, unit, run.timing, tokens, tokens - first))
        for p, generation in zip(asked.prompts, run.generations, strict=True):
            self.answers.append(ScoredAnswer(name, p.id, asked.turn, p.category, generation))


READ = TypeAdapter(Contest)


@dataclass
class Asked:
    """A turn of a chunk: the prompts that can be asked, and what is asked of them."""

    turn: int
    prompts: list[Prompt] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


@dataclass
class Runner:
    """Measures chunks. numbers: of prompts, by id. say(chunk number, system): told of every
    call beforehand. lost: servers that have failed so far."""

    target: Target
    systems: Sequence[System]
    settings: ContestSettings
    numbers: dict[str, int]
    say: Callable[[int, System], None]
    lost: list[dict[str, str]]

    def measure(self, number: int, chunk: Sequence[Prompt]) -> Contest:
        """Return all turns of a chunk, asked of every system."""
        part = Contest()
        history: dict[str, list[dict[str, str]]] = {p.id: [] for p in chunk}
        for turn in range(max(len(p.turns) for p in chunk)):
            asked = self._asked(chunk, turn, history, part.skipped_turns)
            for k in range(len(self.systems)):
                system = self.systems[(k + number) % len(self.systems)]
                self.say(number, system)
                run = self.run(system, asked.requests, self.settings)
                if run is None:
                    continue
                part.note(system.name, chunk, asked, run)
                if system.name == NONE:
                    self._remember(asked, run, history)
        part.lost = list(self.lost)
        part.silent = [one.name for one in self.systems if not one.facts.get("tells", True)]
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
            if not system.facts.get("totals_alone"):
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

    def _asked(
        self,
        chunk: Sequence[Prompt],
        turn: int,
        history: dict[str, list[dict[str, str]]],
        skipped: list[dict[str, Any]],
    ) -> Asked:
        """Return the turn as it is asked; prompts that have outgrown the context go to
        `skipped`."""
        asked, limit = Asked(turn), self.settings.max_new_tokens
        for p in chunk:
            held = history[p.id]
            if turn >= len(p.turns) or len(held) < 2 * turn:
                continue
            held.append({"role": "user", "content": p.turns[turn]})
            ids = chat_ids(self.target.tokenizer, held)
            if unfit(self.target, len(ids), limit):
                skipped.append({"prompt_id": p.id, "turn": turn, "tokens": len(ids)})
                continue
            asked.prompts.append(p)
            asked.requests.append(Request(ids, limit, id=request_id(self.numbers[p.id], turn)))
        return asked

    def _remember(
        self, asked: Asked, run: DecodedRun, history: dict[str, list[dict[str, str]]]
    ) -> None:
        """Keep the answers that later turns go on from."""
        for p, generation in zip(asked.prompts, run.generations, strict=True):
            text = self.target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            history[p.id].append({"role": "assistant", "content": text})


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
    with Steps(*columns(28), quiet=quiet, transient=True) as progress:
        total, done = (len(systems) * sum(some) for some in (turns, turns[: len(parts)]))
        task = progress.add_task("scoring", total=total, completed=done, name="scoring")

        def say(number: int, system: System) -> None:
            note = f"prompt {number * size + 1} of {len(prompts)}, {system.label}"
            progress.update(task, description=clipped(system.label, 28), note=note)
            progress.advance(task)

        def measure(number: int, again: Sequence[pace.Unit] = ()) -> None:
            parts[number] = runner.measure(number, chunks[number])
            parts[number].again = list(again)
            memo.add(name, {"number": number, "part": asdict(parts[number])})

        numbers = {p.id: i for i, p in enumerate(prompts)}
        lost = Contest.joined(list(parts.values())).lost
        runner = Runner(target, systems, settings, numbers, say, lost)
        if len(parts) < len(chunks) or _stalled(parts, systems) is not None:
            runner.warm_up(prompts[0])
        for number in range(len(parts), len(chunks)):
            measure(number)
        while (bad := _stalled(parts, systems)) is not None:
            measure(bad, [*parts[bad].again, tuple(p.id for p in chunks[bad])])
    return Contest.joined([parts[number] for number in range(len(chunks))])


def _stalled(parts: dict[int, Contest], systems: Sequence[System]) -> int | None:
    """Return the number of a chunk that is to be asked again; None where there is none, or
    too many."""
    found = Contest.joined(list(parts.values()))
    lost = {one["name"] for one in found.lost}
    units = {*pace.stalled(found.paces([s.name for s in systems if s.name not in lost]))}
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
