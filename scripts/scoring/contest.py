"""The measured run: every drafter on every prompt, taking turns so that drift of the machine
hits all alike.

For each chunk of prompts the drafters run one after another, and the one that begins moves on
with every chunk. The answers of `none` become the history of later turns. A chunk on which the
machine stalled for one of them (pace.py) is asked again of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from outrider.conf.errors import UserError
from outrider.decode.engine import Cycle, DecodedRun, Generation, Request, Timing
from outrider.decode.fits import unfit
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.names import NONE, DraftSpec
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.names import clipped
from outrider.scripts.common.progress import Steps, columns
from outrider.scripts.common.prompts import Prompt, chat_ids, question_ids
from outrider.scripts.scoring import pace
from outrider.train.memory import peak_bytes, reset_peak

WARM_UP_TOKENS = 8
AGAIN = 2  # times that a chunk is asked again at most
OFTEN = 0.1  # of the chunks; where more of them stalled, asking again would not help
History = dict[str, list[dict[str, str]]]  # prompt id -> messages


@dataclass(frozen=True)
class ContestSettings:
    """What all drafters share."""

    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    seed: int
    wait: bool = False  # at every part of a cycle for the device: exact parts, slower cycles


@dataclass
class System:
    """A row of the table. run(requests, settings) -> Run. name: as the user wrote it, made
    unique; label: short.

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
    """One timed call: a chunk of prompts at the same turn, run by one drafter. tokens: all,
    prefill's included; first: those of the prefill (None: one for each prompt). peak: bytes of
    memory at most."""

    drafter: str
    prompts: tuple[str, ...]
    turn: int
    timing: Timing
    tokens: int
    first: int | None = None
    peak: int | None = None

    @property
    def decoded(self) -> int:
        """Tokens of decoding: those of the prefill are no work of it."""
        return self.tokens - (len(self.prompts) if self.first is None else self.first)


class Turn(NamedTuple):
    """One turn of a chunk of prompts. live: the prompts that can be asked."""

    number: int
    live: list[Prompt]
    requests: list[Request]


@dataclass
class Contest:
    """Everything measured. skipped_turns: (prompt id, turn, why) of turns that no drafter
    could run. lost: {name, reason} of servers that failed on the way, of which nothing is
    kept. sittings: when the run began, and when it went on after it had been stopped.
    again: chunks that were asked again, once for each time.
    """

    answers: list[ScoredAnswer] = field(default_factory=list)
    timed_runs: list[TimedRun] = field(default_factory=list)
    skipped_turns: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, str]] = field(default_factory=list)
    sittings: list[str] = field(default_factory=list)
    again: list[pace.Unit] = field(default_factory=list)

    def calls(self, drafters: Sequence[str]) -> dict[str, dict[pace.Unit, list[TimedRun]]]:
        """Drafter -> chunk -> its timed calls: all turns. A chunk whose shorter prompts are
        through keeps the name of its first turn."""
        found: dict[str, dict[pace.Unit, list[TimedRun]]] = {name: {} for name in drafters}
        for one in self.timed_runs:
            if one.drafter not in found:
                continue
            units = found[one.drafter]
            unit = next((u for u in units if one.turn and set(one.prompts) <= set(u)), one.prompts)
            units.setdefault(unit, []).append(one)
        return found

    def paces(self, drafters: Sequence[str]) -> dict[str, dict[pace.Unit, pace.Pace]]:
        """Drafter -> chunk -> how fast it decoded."""
        calls = self.calls(drafters).items()
        return pace.paces(
            {d: {u: [c.timing for c in cs] for u, cs in of.items()} for d, of in calls}
        )

    def part(self, chunk: Sequence[Prompt]) -> dict[str, Any]:
        """A JSON value of all that was measured on a chunk of prompts."""
        ids = {p.id for p in chunk}
        return {
            "answers": [asdict(one) for one in self.answers if one.prompt_id in ids],
            "laps": [asdict(one) for one in self.timed_runs if ids.issuperset(one.prompts)],
            "skipped_turns": [one for one in self.skipped_turns if one["prompt_id"] in ids],
            "lost": self.lost,
            "sitting": self.sittings[-1],
        }

    def take(self, part: dict[str, Any]) -> None:
        """Add what `part` has told of a chunk, as if it had been measured now."""
        self.skipped_turns += part["skipped_turns"]
        self.lost += [one for one in part["lost"] if one not in self.lost]
        self.sittings += [part["sitting"]] if part["sitting"] not in self.sittings else []
        lost = {one["name"] for one in self.lost}
        self.answers += [ScoredAnswer(**one | _generation(one)) for one in part["answers"]]
        self.timed_runs += [TimedRun(**one | _timing(one)) for one in part["laps"]]
        self.answers = [one for one in self.answers if one.drafter not in lost]
        self.timed_runs = [one for one in self.timed_runs if one.drafter not in lost]

    def retake(self, part: dict[str, Any]) -> None:
        """Replace all that is known of a chunk by `part`, which was measured later."""
        unit = tuple(part["again"])  # of the prompts that ran together
        self.answers = [one for one in self.answers if one.prompt_id not in unit]
        self.timed_runs = [one for one in self.timed_runs if not set(one.prompts) <= {*unit}]
        self.again.append(unit)
        self.take(part)

    def run(
        self, system: System, requests: Sequence[Request], settings: ContestSettings
    ) -> DecodedRun | None:
        """What a system answers; None for one that is lost. A server is beyond our power:
        its failure costs its own row alone, that of any other system is raised."""
        if any(one["name"] == system.name for one in self.lost):
            return None
        try:
            return system.run(requests, settings)
        except UserError as error:
            if not system.facts.get("totals_alone"):
                raise
            self.lost.append({"name": system.name, "reason": str(error)})
            self.answers = [one for one in self.answers if one.drafter != system.name]
            self.timed_runs = [one for one in self.timed_runs if one.drafter != system.name]
            return None

    def note(
        self, system: System, live: Sequence[Prompt], turn: int, run: DecodedRun, most: int | None
    ) -> None:
        """What a system answered to the prompts `live`. most: bytes of memory."""
        tokens = sum(len(g.token_ids) for g in run.generations)
        first = sum(g.cycles[0].start if g.cycles else len(g.token_ids) for g in run.generations)
        unit = tuple(p.id for p in live)
        self.timed_runs.append(TimedRun(system.name, unit, turn, run.timing, tokens, first, most))
        for p, generation in zip(live, run.generations, strict=True):
            self.answers.append(ScoredAnswer(system.name, p.id, turn, p.category, generation))


def _generation(answer: dict[str, Any]) -> dict[str, Any]:
    """The generation of an answer that was read back from JSON."""
    message = answer["generation"]
    lists = ("ranks", "drafters")
    cycles = [Cycle(**one | {key: tuple(one[key]) for key in lists}) for one in message["cycles"]]
    return {"generation": Generation(**message | {"cycles": cycles})}


def _timing(timed_run: dict[str, Any]) -> dict[str, Any]:
    """What JSON has made of a timed run's prompts and timing, undone."""
    return {"prompts": tuple(timed_run["prompts"]), "timing": Timing(**timed_run["timing"])}


class Talks:
    """What was said so far: the answers of `none`."""

    def __init__(self, target: Target, prompts: Sequence[Prompt]) -> None:
        self.target = target
        self.numbers = {p.id: i for i, p in enumerate(prompts)}
        self.history: History = {p.id: [] for p in prompts}

    def requested(
        self, asking: Sequence[Prompt], turn: int, limit: int, skipped: list[dict[str, Any]]
    ) -> Turn:
        """The turn as it is asked, for `limit` tokens; prompts that have outgrown the
        context go to `skipped`."""
        live: list[Prompt] = []
        requests: list[Request] = []
        for p in asking:
            held = self.history[p.id]
            if len(held) < 2 * turn:
                continue
            held.append({"role": "user", "content": p.turns[turn]})
            ids = chat_ids(self.target.tokenizer, held)
            if unfit(self.target, len(ids), limit):
                skipped.append({"prompt_id": p.id, "turn": turn, "tokens": len(ids)})
                continue
            live.append(p)
            requests.append(Request(ids, limit, id=request_id(self.numbers[p.id], turn)))
        return Turn(turn, live, requests)

    def as_before(
        self, contest: Contest, chunk: Sequence[Prompt], settings: ContestSettings
    ) -> list[Turn]:
        """All that was asked of a chunk."""
        asked = {(a.prompt_id, a.turn): a.generation.prompt_ids for a in contest.answers}
        found = []
        for turn in range(max(len(p.turns) for p in chunk)):
            live = [p for p in chunk if (p.id, turn) in asked]
            requests = [
                Request(
                    asked[p.id, turn],
                    settings.max_new_tokens,
                    id=request_id(self.numbers[p.id], turn),
                )
                for p in live
            ]
            found.append(Turn(turn, live, requests))
        return found

    def remember(self, live: Sequence[Prompt], run: DecodedRun) -> None:
        """Answers that later turns go on from."""
        for p, generation in zip(live, run.generations, strict=True):
            text = self.target.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            self.history[p.id].append({"role": "assistant", "content": text})


@dataclass
class Asking:
    """How a turn is asked. say(chunk number, system): told of each system beforehand."""

    systems: Sequence[System]
    settings: ContestSettings
    device: torch.device
    say: Callable[[int, System], None]

    def turn(self, contest: Contest, turn: Turn, number: int) -> dict[str, DecodedRun]:
        """What every system answers to one turn of the chunk `number`, by name; noted."""
        runs = {}
        for k in range(len(self.systems)):
            system = self.systems[(k + number) % len(self.systems)]
            self.say(number, system)
            if not turn.live:
                continue
            reset_peak(self.device)
            run = contest.run(system, turn.requests, self.settings)
            if run is not None:
                contest.note(system, turn.live, turn.number, run, peak_bytes(self.device))
                runs[system.name] = run
        return runs


def run_contest(
    target: Target,
    prompts: Sequence[Prompt],
    systems: Sequence[System],
    settings: ContestSettings,
    quiet: bool = False,
    memo: Memo | None = None,
    name: str = "contest",
) -> Contest:
    """Run every system on every prompt. Chunks of prompts that all systems have answered are
    kept in `memo` under `name`, and those that are there already are not run again: a chunk
    is what the systems are compared on, so no comparison spans a stop.

    Raises UserError when the first turn of a prompt does not fit the context; a later turn
    that does not fit, because the history grew, is skipped for all drafters and noted.
    """
    contest, talks = Contest(), Talks(target, prompts)
    first = _first_questions(target, prompts)
    size = settings.batch_size
    chunks = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    turns = [max(len(p.turns) for p in chunk) for chunk in chunks]
    memo = memo or Memo(None)
    known = memo.lines(name)
    for part in known:
        contest.take(part)
    later = memo.lines(f"{name}-again") if len(known) == len(chunks) else []
    for part in later:
        contest.retake(part)
    for system in systems:
        silent = any(system.name in part["silent"] for part in [*known, *later])
        system.facts |= {"tells": False} if silent else {}
    if len(known) < len(chunks) or _stalled(contest, systems, chunks) is not None:
        contest.sittings.append(datetime.now(UTC).isoformat())
        _warm_up(contest, systems, first[0], settings)
    with Steps(*columns(28), quiet=quiet, transient=True) as progress:
        total, done = (len(systems) * sum(some) for some in (turns, turns[: len(known)]))
        task = progress.add_task("scoring", total=total, completed=done, name="scoring")

        def say(number: int, system: System) -> None:
            note = f"prompt {number * size + 1} of {len(prompts)}, {system.label}"
            progress.update(task, description=clipped(system.label, 28), note=note)
            progress.advance(task)

        asking = Asking(systems, settings, target.device, say)
        for number, chunk in list(enumerate(chunks))[len(known) :]:
            for turn in range(turns[number]):
                asked = [p for p in chunk if turn < len(p.turns)]
                limit, skipped = settings.max_new_tokens, contest.skipped_turns
                one = talks.requested(asked, turn, limit, skipped)
                runs = asking.turn(contest, one, number)
                if NONE in runs:
                    talks.remember(one.live, runs[NONE])
            memo.add(name, contest.part(chunk) | {"silent": _silent(systems)})
        _ask_again(contest, chunks, asking, talks, memo, name)
    return contest


def _ask_again(
    contest: Contest,
    chunks: Sequence[Sequence[Prompt]],
    asking: Asking,
    talks: Talks,
    memo: Memo,
    name: str,
) -> None:
    """Measure chunks again, with all systems, in which the machine stalled for one."""
    while (number := _stalled(contest, asking.systems, chunks)) is not None:
        again = Contest(lost=contest.lost, sittings=contest.sittings)
        for turn in talks.as_before(contest, chunks[number], asking.settings):
            asking.turn(again, turn, number)
        part = again.part(chunks[number]) | {"again": [p.id for p in chunks[number]]}
        part["silent"] = _silent(asking.systems)
        contest.retake(part)
        memo.add(f"{name}-again", part)


def _silent(systems: Sequence[System]) -> list[str]:
    """Names of servers that do not say what they accepted."""
    return [system.name for system in systems if not system.facts.get("tells", True)]


def _stalled(
    contest: Contest, systems: Sequence[System], chunks: Sequence[Sequence[Prompt]]
) -> int | None:
    """The number of a chunk that is to be asked again; None where there is none, or too
    many."""
    lost = {one["name"] for one in contest.lost}
    units = pace.stalled(contest.paces([s.name for s in systems if s.name not in lost]))
    ids = [tuple(p.id for p in chunk) for chunk in chunks]
    bad = [i for i, chunk in enumerate(ids) if any({*unit} <= {*chunk} for unit in units)]
    if len({*(ids[i] for i in bad), *contest.again}) > max(1, OFTEN * len(chunks)):
        return None
    return next((i for i in bad if contest.again.count(ids[i]) < AGAIN), None)


def _first_questions(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The ids of every prompt's first turn. Raises UserError for one beyond the context."""
    first = [question_ids(target.tokenizer, p.turns[0]) for p in prompts]
    for prompt, ids in zip(prompts, first, strict=True):
        if len(ids) >= target.context_length:
            raise UserError(
                f"prompts: {prompt.id} has {len(ids)} tokens and the target's context holds "
                f"{target.context_length}; shorten or remove that prompt"
            )
    return first


def request_id(prompt: int, turn: int) -> int:
    """The id of a turn's request: different for all turns of 2**34 prompts.

    The first 64 turns count up from 64 * prompt, as they always did; later ones go far above
    those.
    """
    later, place = divmod(turn, 64)
    return (later << 40) + 64 * prompt + place


def _warm_up(
    contest: Contest, systems: Sequence[System], ids: list[int], settings: ContestSettings
) -> None:
    tokens = min(WARM_UP_TOKENS, settings.max_new_tokens)
    greedy = ContestSettings(Sampling(), tokens, 1, settings.seed)
    for system in systems:
        contest.run(system, [Request(ids, greedy.max_new_tokens)], greedy)
