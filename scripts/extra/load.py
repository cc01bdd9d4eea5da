"""A small load of running servers: what a cycle costs with 1, 2, 4, 8 requests at a time.

The same prompts are asked for one token and for `limit`; the difference of the two times is
decoding alone, whether the server keeps prompts or reads them again. Every cycle brings one
token more than it accepts, so their number follows from tokens and accepted drafts. Servers
take turns inside a round, so that a busy moment meets all of them. Where an export's contract
says what each prompt accepts one at a time, a load counts how much of that is left in company.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from conf.errors import UserError
from decode.engine import Cycle
from scripts.serving.asking import Address, Ask, Door, Reply
from scripts.serving.costs import Point
from scripts.serving.counters import rise

Watch = Callable[[int, int], None]
TRIES = 4


@dataclass(frozen=True)
class Served:
    """A running server. draft_tokens: what it drafts in a cycle, 0 for a plain one."""

    draft_tokens: int
    address: Address


@dataclass(frozen=True)
class Lap:
    """One load. seconds: of decoding. tokens: decoded behind the first of each answer. cycles:
    of all requests together. due: draft tokens of these answers that are accepted one at a time,
    0 where that is not known."""

    batch: int
    draft_tokens: int
    seconds: float
    tokens: int
    cycles: int
    due: int = 0

    @property
    def ms(self) -> float:
        """Of one cycle of the whole batch."""
        return 1000 * self.seconds * self.batch / self.cycles

    @property
    def speed(self) -> float:
        """Tokens per second of all requests together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Load:
    """What is asked. prompts: token ids; limit: tokens of an answer, from 2 on. cycles: those of
    every prompt's answer as an export's contract counted them, one at a time, with `depth` draft
    tokens; none where the drafter has no contract."""

    prompts: Sequence[Sequence[int]]
    batches: Sequence[int]
    rounds: int
    limit: int
    cycles: Sequence[Sequence[Cycle]] = ()
    depth: int = 0

    def numbers(self, turn: int, batch: int) -> list[int]:
        """Which prompts are asked in a round."""
        return [(turn * batch + i) % len(self.prompts) for i in range(batch)]

    def due(self, numbers: Sequence[int], draft_tokens: int) -> int:
        """Draft tokens of these answers that are accepted one at a time; 0 where nobody knows, as
        of another number of draft tokens, whose cycles begin at other places."""
        if not self.cycles or draft_tokens != self.depth:
            return 0
        return sum(
            min(cycle.accepted, self.limit - cycle.start - 1)  # room for the bonus token
            for i in numbers
            for cycle in self.cycles[i]
            if cycle.start < self.limit
        )


def laps(servers: Sequence[Served], load: Load, watch: Watch) -> list[Lap]:
    """Every round, batch and server. Raises UserError for a server that cannot be asked, or
    does not tell what it accepted."""
    return asyncio.run(_laps(servers, load, watch))


async def _laps(servers: Sequence[Served], load: Load, watch: Watch) -> list[Lap]:
    found: list[Lap] = []
    total = load.rounds * len(load.batches) * len(servers)
    widest = max(load.batches)
    async with AsyncExitStack() as stack:
        doors = [
            await stack.enter_async_context(Door(replace(s.address, connections=widest)))
            for s in servers
        ]
        for number in range(load.rounds):
            for batch in load.batches:
                turn = list(zip(servers, doors, strict=True))
                for server, door in turn if number % 2 == 0 else turn[::-1]:
                    numbers = load.numbers(number, batch)
                    some = [list(load.prompts[i]) for i in numbers]
                    one = await lap(door, server.draft_tokens, some, load.limit)
                    found.append(replace(one, due=load.due(numbers, server.draft_tokens)))
                    watch(len(found), total)
    return found


async def lap(door: Door, draft_tokens: int, prompts: list[list[int]], limit: int) -> Lap:
    """One load of one server, one request for each prompt; taken again, up to TRIES times, where
    a busy moment made the short answers take longer than the long ones. Raises UserError."""
    await _asked(door, prompts, 1)  # read once, where the server keeps prompts
    for _ in range(TRIES):
        short, _replies = await _asked(door, prompts, 1)
        before = await door.metrics() if draft_tokens else None
        long, replies = await _asked(door, prompts, limit)
        after = await door.metrics() if draft_tokens else None
        tokens = sum(_count(door, reply) - 1 for reply in replies)
        cycles = tokens - (_accepted(door, replies, before, after) if draft_tokens else 0)
        if min(tokens, cycles) >= 1 and long > short:
            return Lap(len(prompts), draft_tokens, long - short, tokens, cycles)
    raise UserError(
        f"{door.address.setting}: {door.root}: asked {len(prompts)} answers of {limit} "
        f"tokens; {tokens + len(replies)} came in {long:.3g} s, and one token of each took "
        f"{short:.3g} s: too short to be timed, give more max_new_tokens"
    )


async def _asked(door: Door, prompts: list[list[int]], limit: int) -> tuple[float, list[Reply]]:
    """(seconds, answers) of all prompts at the same time."""
    ask = Ask(limit, keep=True)
    start = time.perf_counter()
    replies = await asyncio.gather(*(door.answer(prompt, ask) for prompt in prompts))
    return time.perf_counter() - start, list(replies)


def _count(door: Door, reply: Reply) -> int:
    if not reply.tokens:
        raise UserError(
            f"{door.address.setting}: {door.root}: asked greedy answers; one came back without "
            "token ids: nothing can be counted"
        )
    return len(reply.tokens)


def _accepted(door: Door, replies: Sequence[Reply], before: str | None, after: str | None) -> int:
    """Draft tokens that were accepted in these answers. before, after: pages of metrics."""
    told = [reply.accepted for reply in replies]
    drafted = [reply.drafted for reply in replies]
    if all(n is not None for n in told) and any(drafted):
        return sum(n for n in told if n is not None)
    found = rise(before, after, ("drafts", "accepted_tokens"))
    if found.rose is None or not found.rose["drafts"]:
        why = found.why or door.unread or "it does not tell what it accepted, or drafted nothing"
        raise UserError(
            f"{door.address.setting}: {door.root}: asked greedy answers; {why}: is it the server "
            "with the drafter?"
        )
    return int(found.rose["accepted_tokens"])


def points(found: Sequence[Lap]) -> list[Point]:
    """The laps of every batch and server as points of a cost curve."""
    groups: dict[tuple[int, int], list[Lap]] = {}
    for one in found:
        groups.setdefault((one.batch, one.draft_tokens), []).append(one)
    return [
        Point(batch, drafts, tuple(one.ms for one in some), kept(some))
        for (batch, drafts), some in sorted(groups.items())
    ]


def kept(found: Sequence[Lap]) -> float | None:
    """Draft tokens that were accepted, over those due; None where none is due or known."""
    due = sum(one.due for one in found)
    return sum(one.tokens - one.cycles for one in found) / due if due else None


def ratios(found: Sequence[Lap]) -> dict[tuple[int, int], list[float]]:
    """(batch, draft tokens) -> speed against the plain server, round by round."""
    speeds: dict[tuple[int, int], list[float]] = {}
    for one in found:
        speeds.setdefault((one.batch, one.draft_tokens), []).append(one.speed)
    return {
        (batch, drafts): [a / b for a, b in zip(rows, speeds[batch, 0], strict=True)]
        for (batch, drafts), rows in sorted(speeds.items())
        if drafts and (batch, 0) in speeds
    }
