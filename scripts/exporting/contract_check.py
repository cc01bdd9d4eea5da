"""Whether a running server does what an export's contract says: its prompts are asked, answers
and what the server counted compared.

An answer that parts at a rival within rounding["most"] parts at a near tie, which is no fault
unless it happens too often; its part before is asked again, so that its counts can be compared,
and what comes behind is not compared. Engines differ in the cycle that ends an answer: vLLM
counts what stands behind the stop token as well, llama.cpp not even that token (`until_stop`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from outrider.decode import stats
from outrider.decode.engine import Cycle
from outrider.scripts.exporting.contract import MANY, Contract, Rounding, Row, rates
from outrider.scripts.scoring.counters import Rise, rise
from outrider.scripts.scoring.server_forms import Reply, ServerRequest
from outrider.scripts.scoring.servers import Address, Endpoint

EDGE = 0.02  # by which the end of an answer alone may move a rate
SHOWN = 3  # faults that are printed


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the expected one. alike: tokens before. gap: of the two best
    logits there. near: 16 bits may choose so; else it is a fault."""

    alike: int
    said: str
    gap: float | None = None
    near: bool = False


@dataclass(frozen=True)
class Asked:
    """One question to the server, of at most `limit` tokens. rose: what its counters rose by
    with it."""

    row: Row
    limit: int
    reply: Reply
    parting: Parting | None
    rose: Rise


@dataclass(frozen=True)
class Counts:
    """What a server counted of an answer that is the contract's, or of its part before a near
    tie. known: the contract's cycles of it. drafts: cycles that drafted; by_position: how many
    of them accepted draft token 1, 2, .., [] where that is not told. gaps: of the two best
    logits at its tokens."""

    known: list[Cycle]
    drafted: int
    accepted: int
    drafts: int | None
    by_position: Sequence[int] = ()
    gaps: list[float] = field(default_factory=list)


def checked(wanted: Contract, address: Address) -> dict[str, Any]:
    """Return what a server did against a contract, with its kind; counters: what is wrong
    with its counters.

    equal: answers as expected. near_ties: where others part at one. faults: where answers part
    otherwise, in words. odds: see Rounding. not_compared: expected tokens behind near ties.
    acceptance: see `acceptance`; None where the server tells none. longer: a cycle drafted more
    than expected, where the cycles are told. served: no fault, and the acceptance is equal.

    Raises UserError for a server that cannot be asked.
    """
    kind, unread, every = asyncio.run(_asked(wanted, address))
    flat = [one for asked in every for one in asked]
    by_page = all(one.rose.rose for one in flat)
    by_page = by_page and sum((one.rose.rose or {})["drafts"] for one in flat) > 0
    counts = [_counts(wanted, one, by_page) for one in flat]
    said = _answers(wanted, every)
    ends = [count for one, count in zip(flat, counts, strict=True) if one.parting is None]
    told = [count for count in ends if count is not None]
    whole = len(told) == len(ends) and any(count.drafted for count in told)
    found = acceptance(wanted, told) if whole else None
    depth = wanted.draft_tokens
    return {
        "kind": kind,
        "counters": next((one.rose.why for one in flat if one.rose.why), unread),
        "draft_tokens": depth,
        **said,
        "acceptance": found,
        "longer": any(c is not None and c.drafted > depth * (c.drafts or math.inf) for c in counts),
        "served": _answered(said) and found is not None and found["equal"],
    }


async def _asked(wanted: Contract, address: Address) -> tuple[str, str, list[list[Asked]]]:
    """(kind of server, what of its counters cannot be read, the questions of every prompt)."""
    every: list[list[Asked]] = []
    async with Endpoint(address) as door:
        page = await door.metrics()
        for row in wanted.prompts:
            asked, limit = list[Asked](), wanted.max_new_tokens
            while limit:
                reply = await door.answer(row.ids, ServerRequest(limit))
                before, page = page, None if page is None else await door.metrics()
                parts = parting(wanted, row, reply, limit)
                asked.append(Asked(row, limit, reply, parts, rise(before, page)))
                # the first token is drafted by nobody
                limit = parts.alike if parts and parts.near and parts.alike > 1 else 0
            every.append(asked)
        return door.kind, door.unread, every


# -- answers


def parting(wanted: Contract, row: Row, answer: Reply, limit: int) -> Parting | None:
    """Return where the answer behind a prompt, of at most `limit` tokens, leaves the
    expected one; None where it does not."""
    if answer.tokens is None:
        mine, theirs = row.text, answer.text
        at = first_apart(mine, theirs)
        said = f"{theirs[at : at + 20]!r} instead of {mine[at : at + 20]!r}"
        apart = f"the text parts at character {at}: {said} (it tells no token ids)"
        return None if mine == theirs else Parting(0, apart)
    stop, expected = set(wanted.stop), row.tokens[:limit]
    ours, other = ([t for t in side if t not in stop] for side in (expected, answer.tokens))
    if ours == other:
        return None
    at = first_apart(ours, other)
    here, there = ([*map(str, side)][at : at + 1] or ["the end"] for side in (ours, other))
    said = f"token {at + 1} is {there[0]} instead of {here[0]}"
    if at >= len(expected):
        return Parting(at, said)
    rivals, most = row.rivals[at], wanted.rounding.most
    chosen = {other[at]} if at < len(other) else stop if answer.stopped else set()
    gap = next((gap for token, gap in rivals if token in chosen), None)
    lead = f"by {rivals[0][1]:.2g} or more" if gap is None else f"by {gap:.2g}"
    said += f", whose logit leads {lead}; 16 bits move {most:.2g}"
    return Parting(at, said, gap, gap is not None and gap <= most)


def first_apart(mine: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Return the first place where they differ."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))


def _answers(wanted: Contract, every: list[list[Asked]]) -> dict[str, Any]:
    """Return what came of the answers, each of which may have been asked in parts."""
    ties, faults, behind = list[dict[str, Any]](), list[str](), 0
    seen = list[tuple[float, bool]]()
    for number, (row, asked) in enumerate(zip(wanted.prompts, every, strict=True), 1):
        parts = [one.parting for one in asked if one.parting]
        if wrong := [part for part in parts if not part.near]:
            faults.append(f"prompt {number}: {wrong[0].said}")
            continue
        alike = parts[0].alike if parts else len(row.tokens)
        if parts:
            ties.append({"prompt": number, "token": alike + 1, "gap": parts[0].gap})
            behind += len(row.tokens) - parts[-1].alike
        seen += [(gap, place == alike) for place, gap in enumerate(row.gaps(alike + 1))]
    return {
        "answers": len(every),
        "equal": len(every) - len(ties) - len(faults),
        "near_ties": ties,
        "faults": faults,
        "odds": wanted.rounding.odds(seen),
        "not_compared": behind,
    }


def _answered(said: dict[str, Any]) -> bool:
    """Return whether nothing but rounding parts the answers."""
    return not said["faults"] and said["odds"] < MANY


# -- acceptance


def until_stop(
    cycles: Sequence[Cycle], tokens: Sequence[int], stop: Collection[int]
) -> list[Cycle]:
    """Return the cycles of an answer `tokens` as an engine counts them for which an
    accepted token that ends the text is none."""
    out = []
    for cycle in cycles:
        drafted = tokens[cycle.start : cycle.start + cycle.accepted]
        before = next((i for i, token in enumerate(drafted) if token in stop), cycle.accepted)
        out.append(replace(cycle, accepted=before))
    return out


def _counts(wanted: Contract, one: Asked, by_page: bool) -> Counts | None:
    """Return what the server counted, on its page or with the answer (SGLang, llama.cpp,
    our own); None where it tells nothing."""
    known, gaps = one.row.cycles(one.limit), one.row.gaps(one.limit)
    if by_page:
        rose = one.rose.rose or {}
        counts = (rose["draft_tokens"], rose["accepted_tokens"], rose["drafts"])
        return Counts(known, *counts, rose["accepted_by_position"], gaps)
    reply = one.reply
    if reply.drafted is None or reply.accepted is None:
        return None
    if reply.drafts is None:  # llama.cpp
        known = until_stop(known, one.row.tokens, wanted.stop)
    return Counts(known, reply.drafted, reply.accepted, reply.drafts, (), gaps)


def acceptance(wanted: Contract, counts: Sequence[Counts]) -> dict[str, Any]:
    """Drafted and accepted tokens of one answer or more beside the contract's.

    equal: the rates lie within the contract's intervals, since engines differ at the end of
    an answer and 16 bits turn draft tokens too. position: the first draft token whose rate
    does not.
    """
    known = [count.known for count in counts]
    flat = [cycle for cycles in known for cycle in cycles]
    mine, theirs = sum(c.accepted for c in flat), sum(count.accepted for count in counts)
    cycles = max(sum(c.proposed > 0 for c in flat), 1)
    # where they are not told: as many tokens, so a draft token less is a cycle more
    told = [count.drafts for count in counts if count.drafts is not None]
    drafts = max(1, sum(told) if told else cycles + mine - theirs)
    wanted_length, by_position = rates(known)
    # an end weighs more where fewer cycles come before it
    whole = sum(p > 0 for row in wanted.prompts for p in row.proposed)
    edge = EDGE * whole * len(counts) / len(wanted.prompts) / cycles
    edge += _turned(wanted.rounding, counts, cycles)
    alone = edge + max((c.proposed for c in flat), default=0) / cycles

    def inside(value: float, rate: stats.Interval) -> bool:
        """Return one prompt has no interval: there a cycle's draft may be counted otherwise."""
        if rate.low is None or rate.high is None:
            return abs(value - rate.mean) <= alone
        return rate.low - edge <= value <= rate.high + edge

    hits = [sum(at) for at in zip_longest(*(c.by_position for c in counts), fillvalue=0)]
    positions = enumerate(zip(by_position, hits, strict=False), 1)
    place = next((d for d, (rate, n) in positions if not inside(n / drafts, rate)), None)
    length = 1 + theirs / drafts
    return {
        "answers": len(counts),
        "drafted": {
            "expected": sum(c.proposed for c in flat),
            "server": sum(c.drafted for c in counts),
        },
        "accepted": {"expected": mine, "server": theirs},
        "accepted_length": {"expected": wanted_length.json(), "server": length},
        "position": place,
        "equal": place is None and inside(length, wanted_length),
    }


def _turned(rounding: Rounding, counts: Sequence[Counts], cycles: int) -> float:
    """Return the most by which 16 bits move a rate over so many cycles, when they turn
    draft tokens as often as the target's own: three standard deviations above the mean."""
    every = [rounding.turned(gap) for count in counts for gap in count.gaps]
    mean = sum(every) / max(len(every), 1)
    return mean + 3 * math.sqrt(mean / cycles)


def summary(found: dict[str, Any]) -> list[str]:
    """Return the verdict for people."""
    ties, faults, said = found["near_ties"], found["faults"], found["acceptance"]
    line = f"answers: {found['equal']} of {found['answers']} as expected"
    if ties:
        most = max(tie["gap"] for tie in ties)
        line += f", {len(ties)} part at near ties (gaps up to {most:.2g})"
    lines = [line, *faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"and {len(faults) - SHOWN} more")
    if not faults and not _answered(found):
        lines.append(
            f"they part at gaps that 16 bits seldom turn: a change of the target explains it "
            f"{found['odds']:,.0f} times better"
        )
    if said is None:
        why = found["counters"] or "the server tells none (no counters, or it does not speculate)"
        lines.append(f"acceptance: {why}")
    else:
        where = f" in {said['answers']} of {found['answers']} answers" if faults else ""
        where += " up to the near ties" if ties else ""
        lines.append(
            f"accepted draft tokens: {said['accepted']['server']} of {said['drafted']['server']}, "
            f"expected {said['accepted']['expected']} of {said['drafted']['expected']}{where}"
        )
        if said["position"] is not None:
            lines.append(f"it parts at draft position {said['position']}")
    if found["not_compared"]:
        lines.append(f"not compared: {found['not_compared']} tokens behind the near ties")
    if found["longer"]:
        depth = found["draft_tokens"]
        lines.append(f"it drafts more than {depth} tokens a step: start it with K = {depth}")
    verdict = "serves what was trained" if found["served"] else "does not serve what was trained"
    return [*lines, verdict]
