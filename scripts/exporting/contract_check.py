"""Whether a running server does what an export's contract says: its prompts are asked, answers
and what the server counted compared.

An answer that parts at a rival within rounding is no fault; its part before is asked again, so
that its counts can be compared, and what comes behind is not compared. Engines count the cycle
that ends an answer each in their own way, by a draft at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.decode import stats
from outrider.scripts.exporting.contract import Contract, Row
from outrider.scripts.scoring.counters import Rise, rise
from outrider.scripts.scoring.server_forms import Reply, ServerRequest
from outrider.scripts.scoring.servers import Endpoint


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the expected one. alike: tokens before. near: 16 bits may choose
    so; else it is a fault."""

    alike: int
    said: str
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

    def counts(self) -> tuple[int, int, int | None] | None:
        """Return draft tokens, those accepted and drafts, as the server's page tells them, or
        the answer itself (SGLang, llama.cpp, our own); None where neither does."""
        reply, page = self.reply, self.rose.rose
        if reply.drafted is not None and reply.accepted is not None:
            return reply.drafted, reply.accepted, reply.drafts
        if page is None:
            return None
        return page["draft_tokens"], page["accepted_tokens"], page["drafts"]


def checked(wanted: Contract, server: Endpoint) -> dict[str, Any]:
    """Return what a server did against a contract, with its kind; counters: what is wrong
    with its counters.

    equal: answers as expected. near_ties: those that part at one. faults: where answers part
    otherwise, in words. not_compared: expected tokens behind near ties. acceptance: see
    `acceptance`; None where the server tells none. longer: a cycle drafted more than expected,
    where the cycles are reported. served: no fault, and the acceptance is equal.

    Raises UserError for a server that cannot be asked.
    """
    kind, unread, every = asyncio.run(_asked(wanted, server))
    last = [asked[-1] for asked in every]  # of every prompt, after near ties
    faults = [
        f"prompt {number}: {one.parting.said}"
        for number, one in enumerate(last, 1)
        if one.parting and not one.parting.near
    ]
    whole = [one for one in last if one.parting is None]
    equal = sum(asked[0].parting is None for asked in every)
    found, depth = acceptance(wanted, whole), wanted.draft_tokens
    told = [counts for asked in every for one in asked if (counts := one.counts())]
    return {
        "kind": kind,
        "counters": next((one.rose.why for one in last if one.rose.why), unread),
        "draft_tokens": depth,
        "answers": len(every),
        "equal": equal,
        "near_ties": len(every) - equal - len(faults),
        "faults": faults,
        "not_compared": sum(len(one.row.tokens[one.limit :]) for one in last),
        "acceptance": found,
        "longer": any(drafts and drafted > depth * drafts for drafted, _, drafts in told),
        "served": not faults and found is not None and found["equal"],
    }


async def _asked(wanted: Contract, server: Endpoint) -> tuple[str, str, list[list[Asked]]]:
    """(kind of server, what of its counters cannot be read, the questions of every prompt)."""
    every: list[list[Asked]] = []
    async with server as door:
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


def parting(wanted: Contract, row: Row, answer: Reply, limit: int) -> Parting | None:
    """Return where the answer behind a prompt, of at most `limit` tokens, leaves the
    expected one; None where it does not."""
    if answer.tokens is None:
        said = f"{answer.text[:60]!r} instead of {row.text[:60]!r} (it tells no token ids)"
        return None if answer.text == row.text else Parting(0, said)
    stop, expected = set(wanted.stop), row.tokens[:limit]
    ours, other = ([t for t in side if t not in stop] for side in (expected, answer.tokens))
    if ours == other:
        return None
    pairs = enumerate(zip(ours, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(other)))
    here, there = ([*map(str, side)][at : at + 1] or ["the end"] for side in (ours, other))
    said = f"token {at + 1} is {there[0]} instead of {here[0]}, which 16 bits do not explain"
    chosen = {other[at]} if at < len(other) else stop if answer.stopped else set()
    near = at < len(expected) and bool(chosen & {*row.near[at]})
    return Parting(at, said, near)


def acceptance(wanted: Contract, whole: Sequence[Asked]) -> dict[str, Any] | None:
    """Drafted and accepted tokens of answers that are the contract's, or of their parts before
    near ties, beside the contract's; None where a server does not tell them, or drafted nothing.

    equal: the share of draft tokens that are accepted is within the contract's 95 % interval,
    and what a draft at every end of an answer may move it by.
    """
    told = [counts for one in whole if (counts := one.counts())]
    drafted, accepted = sum(counts[0] for counts in told), sum(counts[1] for counts in told)
    if len(told) < len(whole) or not drafted:
        return None
    known = [one.row.counts(one.limit) for one in whole]
    trials, hits = zip(*known, strict=True)
    share = stats.ratio_interval(hits, trials)
    edge = wanted.draft_tokens * len(whole) / max(sum(trials), 1)
    low, high = (share.mean if end is None else end for end in (share.low, share.high))
    return {
        "answers": len(whole),
        "drafted": {"expected": sum(trials), "server": drafted},
        "accepted": {"expected": sum(hits), "server": accepted},
        "share": {"expected": share.json(), "server": accepted / drafted},
        "equal": low - edge <= accepted / drafted <= high + edge,
    }


def summary(found: dict[str, Any]) -> list[str]:
    """Return the verdict for people."""
    ties, faults, said = found["near_ties"], found["faults"], found["acceptance"]
    line = f"answers: {found['equal']} of {found['answers']} as expected"
    if ties:
        line += f", {ties} part at near ties ({found['not_compared']} tokens behind not compared)"
    lines = [line, *faults]
    if ties == found["answers"]:
        lines.append("no answer is whole: weights that differ this little pass; try float32 there")
    if said is None:
        why = found["counters"] or "the server tells none (no counters, or it does not speculate)"
        lines.append(f"acceptance: {why}")
    else:
        server, expected = (
            f"{said['accepted'][side]} of {said['drafted'][side]}"
            for side in ("server", "expected")
        )
        where = f" in {said['answers']} of {found['answers']} answers" if faults else ""
        lines.append(f"accepted draft tokens: {server}, expected {expected}{where}")
    if found["longer"]:
        depth = found["draft_tokens"]
        lines.append(f"it drafts more than {depth} tokens a step: start it with K = {depth}")
    verdict = "serves what was trained" if found["served"] else "does not serve what was trained"
    return [*lines, verdict]
