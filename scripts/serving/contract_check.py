"""Asking a running server the prompts of an export's contract."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.scripts.serving import contract
from outrider.scripts.serving.asking import Address, Endpoint, Reply, ServerRequest
from outrider.scripts.serving.counters import rise

SHOWN = 3  # places where it parts that are printed


def checked(wanted: dict[str, Any], address: Address) -> dict[str, Any]:
    """What a server did against a contract (contract.verdict), with its kind; counters: what is
    wrong with its counters.

    Raises UserError for a server that cannot be asked.
    """
    return asyncio.run(_checked(wanted, address))


async def _checked(wanted: dict[str, Any], address: Address) -> dict[str, Any]:
    ask = ServerRequest(wanted["max_new_tokens"])
    answers, replies = [], []
    async with Endpoint(address) as door:
        before = await door.metrics()
        for row in wanted["prompts"]:
            reply = await door.answer(row["ids"], ask)
            replies.append(reply)
            by_cycle = reply.drafts is None  # whose counts end where llama.cpp's do
            answers.append(
                {
                    "tokens": reply.tokens,
                    "text": reply.text,
                    "accepted": reply.accepted if by_cycle else None,
                    "draft_tokens": reply.drafted if by_cycle else None,
                    "ignored": list(reply.ignored),
                }
            )
        found = rise(before, await door.metrics())
        kind, unread = door.kind, door.unread
    counted = found.rose if found.rose and found.rose["drafts"] else _summed(replies)
    said = contract.verdict(wanted, answers, counted)
    drafts = wanted["draft_tokens"]
    return {"kind": kind, "counters": found.why or unread, "draft_tokens": drafts, **said}


def _summed(replies: list[Reply]) -> dict[str, Any] | None:
    """What SGLang tells with its answers, as the counters of a server's page; None where an answer
    tells nothing, or nothing was drafted."""
    if any(reply.drafts is None for reply in replies):
        return None
    found = {
        "drafts": sum(reply.drafts or 0 for reply in replies),
        "draft_tokens": sum(reply.drafted or 0 for reply in replies),
        "accepted_tokens": sum(reply.accepted or 0 for reply in replies),
        "accepted_by_position": [],
    }
    return found if found["drafts"] else None


def summary(found: dict[str, Any]) -> list[str]:
    """The verdict for people."""
    lines = [f"answers: {found['equal']} of {found['answers']} as expected"]
    lines += found["parts"][:SHOWN]
    if len(found["parts"]) > SHOWN:
        lines.append(f"and {len(found['parts']) - SHOWN} more")
    said = found["acceptance"]
    if said is None:
        why = found["counters"] or "the server tells none (no counters, or it does not speculate)"
        lines.append(f"acceptance: {why}")
    else:
        lines.append(
            f"accepted draft tokens: {said['accepted']['server']} of {said['drafted']['server']}, "
            f"expected {said['accepted']['expected']} of {said['drafted']['expected']}"
        )
        if said["drafted"]["server"] > said["drafted"]["expected"]:
            lines.append(
                f"it drafts more than was expected of {found['draft_tokens']} tokens a step: start "
                f"it with K = {found['draft_tokens']} to compare"
            )
        if said["position"] is not None:
            lines.append(f"it parts at draft position {said['position']}")
    lines.append(
        "serves what was trained" if found["served"] else "does not serve what was trained"
    )
    return lines
