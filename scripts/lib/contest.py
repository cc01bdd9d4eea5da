"""The measured run: every drafter on every prompt, taking turns so that drift of the machine hits all alike.

For each chunk of prompts the drafters run one after another, and the one that begins moves on with every chunk.
Answers of `none` become the history of later turns, so that all drafters see the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from conf.errors import UserError
from decode.engine import Generation, Request, Run, Timing, generate
from decode.sampling import Sampling
from decode.target import Target
from heads import resolve_drafter
from scripts.lib.prompts import Prompt, chat_ids
from scripts.lib.reference import hf_generate

REFERENCES = {"hf_generate": hf_generate}
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    """What all drafters share."""

    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    seed: int
    verify: str


@dataclass
class Lane:
    """A row of the table. run(requests, settings) -> Run. name: as the user wrote it, made unique; label: short."""

    name: str
    label: str
    kind: str
    shape: str
    depth: int
    nodes: int
    run: Callable[[Sequence[Request], Settings], Run]


@dataclass
class Answer:
    """What one drafter wrote for one turn of one prompt."""

    drafter: str
    prompt_id: str
    turn: int
    category: str
    generation: Generation


@dataclass
class Lap:
    """One timed call: a chunk of prompts at the same turn, run by one drafter. tokens: all, prefill's included."""

    drafter: str
    prompts: tuple[str, ...]
    turn: int
    timing: Timing
    tokens: int


@dataclass
class Contest:
    """Everything measured. skipped_turns: (prompt id, turn, why) of turns that no drafter could run."""

    answers: list[Answer] = field(default_factory=list)
    laps: list[Lap] = field(default_factory=list)
    skipped_turns: list[dict[str, Any]] = field(default_factory=list)


def lanes_of(specs: Sequence[str], target: Target) -> tuple[list[Lane], list[dict[str, str]]]:
    """(drafters that load, [{name, reason}] of those that do not). `none` is put in front when it is not listed."""
    lanes: list[Lane] = []
    skipped: list[dict[str, str]] = []
    for spec in [*([] if "none" in specs else ["none"]), *specs]:
        try:
            lane = _lane(spec, target)
        except UserError as error:
            skipped.append({"name": spec, "reason": str(error)})
            continue
        taken = {other.name for other in lanes}
        if lane.name in taken:
            lane.name = lane.label = next(n for i in range(2, 99) if (n := f"{lane.name} #{i}") not in taken)
        lanes.append(lane)
    short = [Path(lane.name).name for lane in lanes]
    for lane, label in zip(lanes, short, strict=True):
        lane.label = label if short.count(label) == 1 else lane.name
    return lanes, skipped


def _lane(spec: str, target: Target) -> Lane:
    if spec in REFERENCES:
        reference = REFERENCES[spec]
        return Lane(spec, spec, "reference", "none", 0, 0, lambda requests, s: reference(
            target, requests, s.sampling, batch_size=s.batch_size, seed=s.seed))  # fmt: skip
    drafter = resolve_drafter(spec, target)
    shape = "none" if not drafter.max_nodes else "chain" if drafter.max_nodes == drafter.max_depth else "tree"
    kind = getattr(drafter, "kind", spec)
    return Lane(spec, spec, kind, shape, drafter.max_depth, drafter.max_nodes,
                lambda requests, s: generate(target, drafter, requests, s.sampling, batch_size=s.batch_size,
                                             seed=s.seed, verify=s.verify))  # fmt: skip


def run_contest(target: Target, tokenizer: Any, prompts: Sequence[Prompt], lanes: Sequence[Lane], settings: Settings,
                quiet: bool = False) -> Contest:  # fmt: skip
    """Run every lane on every prompt.

    Raises UserError when the first turn of a prompt does not fit the context; a later turn that does not fit,
    because the history grew, is skipped for all drafters and noted.
    """
    contest = Contest()
    history: dict[str, list[dict[str, str]]] = {p.id: [] for p in prompts}
    numbers = {p.id: i for i, p in enumerate(prompts)}
    first = [chat_ids(tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in prompts]
    for prompt, ids in zip(prompts, first, strict=True):
        if len(ids) >= target.context_length:
            raise UserError(f"prompts: {prompt.id} has {len(ids)} tokens and the target's context holds "
                            f"{target.context_length}; shorten or remove that prompt")  # fmt: skip
    _warm_up(lanes, first[0], settings)
    size = settings.batch_size
    chunks = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    total = sum(max(len(p.turns) for p in chunk) for chunk in chunks) * len(lanes)
    columns = (TextColumn("[bold]{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, disable=quiet, transient=True) as progress:
        task = progress.add_task("scoring", total=total)
        for number, chunk in enumerate(chunks):
            for turn in range(max(len(p.turns) for p in chunk)):
                live, requests = [], []
                for p in chunk:
                    if turn >= len(p.turns) or len(history[p.id]) < 2 * turn:
                        continue
                    history[p.id].append({"role": "user", "content": p.turns[turn]})
                    ids = chat_ids(tokenizer, history[p.id])
                    if len(ids) >= target.context_length:
                        contest.skipped_turns.append({"prompt_id": p.id, "turn": turn, "tokens": len(ids)})
                        continue
                    live.append(p)
                    requests.append(Request(ids, settings.max_new_tokens, id=numbers[p.id] * 64 + turn))
                for k in range(len(lanes)):
                    lane = lanes[(k + number) % len(lanes)]
                    progress.update(task, description=lane.name[:28])
                    if requests:
                        run = lane.run(requests, settings)
                        _note(contest, lane, live, turn, run)
                        if lane.name == "none":
                            _remember(tokenizer, history, live, run)
                    progress.advance(task)
    return contest


def _note(contest: Contest, lane: Lane, live: Sequence[Prompt], turn: int, run: Run) -> None:
    tokens = sum(len(g.token_ids) for g in run.generations)
    contest.laps.append(Lap(lane.name, tuple(p.id for p in live), turn, run.timing, tokens))
    for p, generation in zip(live, run.generations, strict=True):
        contest.answers.append(Answer(lane.name, p.id, turn, p.category, generation))


def _remember(tokenizer: Any, history: dict[str, list[dict[str, str]]], live: Sequence[Prompt], run: Run) -> None:
    for p, generation in zip(live, run.generations, strict=True):
        text = tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        history[p.id].append({"role": "assistant", "content": text})


def _warm_up(lanes: Sequence[Lane], ids: list[int], settings: Settings) -> None:
    greedy = Settings(Sampling(), min(WARM_UP_TOKENS, settings.max_new_tokens), 1, settings.seed, settings.verify)
    for lane in lanes:
        lane.run([Request(ids, greedy.max_new_tokens)], greedy)
