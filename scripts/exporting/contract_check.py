"""Asking a running server the prompts of an export's contract."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from outrider.scripts.exporting import contract
from outrider.scripts.exporting.contract import Parting, Piece
from outrider.scripts.exporting.near_ties import MANY
from outrider.scripts.scoring.counters import Rise, rise
from outrider.scripts.scoring.servers import Address, Endpoint, Reply, ServerRequest

SHOWN = 3  # faults that are printed


@dataclass(frozen=True)
class _Asked:
    """One question to the server. rose: what its counters rose by with it."""

    prompt: int
    limit: int
    reply: Reply
    parting: Parting | None
    rose: Rise


def checked(wanted: dict[str, Any], address: Address) -> dict[str, Any]:
    """What a server did against a contract, with its kind; counters: what is wrong with its
    counters.

    equal: answers as expected. near_ties: where others part at one; their part before it is
    asked again, so that its counts can be compared. faults: where answers part otherwise, in
    words. odds: see near_ties.Rounding. not_compared: expected tokens behind near ties.
    acceptance: see contract.acceptance; None where the server tells none. longer: a cycle
    drafted more than expected. served: no fault, and the acceptance is equal.

    Raises UserError for a server that cannot be asked.
    """
    return asyncio.run(_checked(wanted, address))


async def _checked(wanted: dict[str, Any], address: Address) -> dict[str, Any]:
    every: list[list[_Asked]] = []
    async with Endpoint(address) as door:
        page = await door.metrics()
        for prompt, row in enumerate(wanted["prompts"]):
            asked, limit = list[_Asked](), wanted["max_new_tokens"]
            while limit:
                reply = await door.answer(row["ids"], ServerRequest(limit))
                before, page = page, None if page is None else await door.metrics()
                parts = contract.parting(wanted, row, reply, limit)
                asked.append(_Asked(prompt, limit, reply, parts, rise(before, page)))
                # the first token is drafted by nobody
                limit = parts.alike if parts and parts.near and parts.alike > 1 else 0
            every.append(asked)
        kind, unread = door.kind, door.unread
    flat = [one for asked in every for one in asked]
    by_page = sum((one.rose.rose or {}).get("drafts", 0) for one in flat) > 0
    by_page = by_page and all(one.rose.rose for one in flat)
    pieces = [_piece(one, by_page) for one in flat]
    said = _answers(wanted, every)
    ends = [piece for one, piece in zip(flat, pieces, strict=True) if one.parting is None]
    compared = [piece for piece in ends if piece is not None]
    told = len(compared) == len(ends) and any(piece.drafted for piece in compared)
    found = contract.acceptance(wanted, compared) if told else None
    return {
        "kind": kind,
        "counters": next((one.rose.why for one in flat if one.rose.why), unread),
        "draft_tokens": wanted["draft_tokens"],
        **said,
        "acceptance": found,
        "longer": any(
            _longer(one, piece, wanted["draft_tokens"])
            for one, piece in zip(flat, pieces, strict=True)
        ),
        "served": _answered(said) and found is not None and found["equal"],
    }


def _answers(wanted: dict[str, Any], every: list[list[_Asked]]) -> dict[str, Any]:
    """What came of the answers, each of which may have been asked in parts."""
    ties, faults, behind = list[dict[str, Any]](), list[str](), 0
    seen = list[tuple[float, bool]]()
    rounding = contract.rounding(wanted)
    for number, (row, asked) in enumerate(zip(wanted["prompts"], every, strict=True), 1):
        wrong = [one.parting for one in asked if one.parting and not one.parting.near]
        near = [one.parting for one in asked if one.parting]
        if wrong:
            faults.append(f"prompt {number}: {wrong[0].said}")
        elif near:
            ties.append({"prompt": number, "token": near[0].alike + 1, "gap": near[0].gap})
            behind += len(row["tokens"]) - near[-1].alike
        if rounding and not wrong:
            alike = near[0].alike if near else len(row["tokens"])
            pairs = enumerate(contract.gaps(row)[: alike + 1])
            seen += [(gap, place == alike) for place, gap in pairs]
    return {
        "answers": len(every),
        "equal": len(every) - len(ties) - len(faults),
        "near_ties": ties,
        "faults": faults,
        "odds": rounding.odds(seen) if rounding else None,
        "not_compared": behind,
    }


def _answered(said: dict[str, Any]) -> bool:
    """Whether nothing but rounding parts the answers."""
    return not said["faults"] and (said["odds"] or 0.0) < MANY


def _piece(one: _Asked, by_page: bool) -> Piece | None:
    """What the server counted, on its page or with the answer (SGLang, llama.cpp, our own);
    None where it tells nothing."""
    if by_page:
        rose = one.rose.rose or {}
        counts = (rose["draft_tokens"], rose["accepted_tokens"], rose["drafts"])
        return Piece(one.prompt, one.limit, *counts, rose["accepted_by_position"])
    reply = one.reply
    if reply.drafted is None or reply.accepted is None:
        return None
    return Piece(one.prompt, one.limit, reply.drafted, reply.accepted, reply.drafts)


def _longer(one: _Asked, piece: Piece | None, depth: int) -> bool:
    """Whether a cycle is sure to have drafted more than `depth` tokens."""
    if piece is None or one.reply.tokens is None:
        return False
    cycles = piece.drafts
    if cycles is None:  # each gives a token more than it accepted
        cycles = len(one.reply.tokens) - piece.accepted
    return piece.drafted > depth * cycles or any(piece.by_position[depth:])


def summary(found: dict[str, Any]) -> list[str]:
    """The verdict for people."""
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
    if faults and found["odds"] is None:
        lines.append(
            "expected.json holds no gaps of logits, so that a near tie is not told from a fault: "
            "export the head again"
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
    lines.append(
        "serves what was trained" if found["served"] else "does not serve what was trained"
    )
    return lines
