"""Acceptance as a contract: what an exported head is expected to do, in a file beside it, and
whether a running server does it.

`expected.json` holds prompts as token ids, the greedy answer behind each, and what our chain
of the exported numbers accepted there. Cycles are counted as engines count them: all that a
cycle accepted, also behind a stop token; a draft never reaches beyond the length limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.jsonl import parse_line
from decode import stats
from decode.drafters import NoDraft
from decode.engine import Cycle, Request, generate
from decode.sampling import Sampling
from decode.target import Target

NAME = "expected.json"
FORMAT = 1


def expected(
    target: Target, drafter: Any, prompts: Sequence[Sequence[int]], depth: int, limit: int
) -> dict[str, Any]:
    """The contract of a chain of `depth` over greedy answers of at most `limit` tokens.

    drafter: a chain drafter with the exported numbers. prompts: token ids, one or more each.
    """
    drafter.max_depth = drafter.max_nodes = depth
    requests = [Request(list(p), limit, id=i) for i, p in enumerate(prompts)]
    plain = generate(target, NoDraft(), requests, Sampling(), batch_size=len(requests))
    run = generate(target, drafter, requests, Sampling(), batch_size=len(requests))
    rows = []
    for request, base, found in zip(requests, plain.generations, run.generations, strict=True):
        rows.append(
            {
                "ids": list(request.prompt),
                "tokens": base.token_ids,
                "text": _text(target, base.token_ids),
                "proposed": [c.proposed for c in found.cycles],
                "accepted": [c.accepted for c in found.cycles],
            }
        )
    cycles = [found.cycles for found in run.generations]
    return {
        "format": FORMAT,
        "temperature": 0,
        "max_new_tokens": limit,
        "draft_tokens": depth,
        "stop": list(target.eos_ids),
        "vocab": target.vocab_size,
        **rates(cycles),
        "prompts": rows,
    }


def _text(target: Target, tokens: Sequence[int]) -> str:
    kept = [t for t in tokens if t not in target.eos_ids]
    return str(target.tokenizer.decode(kept))


def rates(cycles: Sequence[Sequence[Cycle]]) -> dict[str, Any]:
    """Accepted length and unconditional acceptance by position with 95 % intervals."""
    flat = [c for row in cycles for c in row]
    return {
        "cycles": len(flat),
        "accepted_length": stats.accepted_length(cycles).json(),
        "accepted_by_position": hits(flat),
        "acceptance_by_position": [whole.json() for _, whole in stats.position_intervals(cycles)],
    }


def hits(cycles: Sequence[Cycle]) -> list[int]:
    """How many cycles accepted draft position 1, 2, .."""
    deepest = max((c.proposed for c in cycles), default=0)
    return [sum(c.accepted > d for c in cycles) for d in range(deepest)]


def cycles_of(contract: dict[str, Any]) -> list[list[Cycle]]:
    """The cycles of every prompt as they were counted."""
    return [
        [Cycle(p, a, (), False, 0) for p, a in zip(row["proposed"], row["accepted"], strict=True)]
        for row in contract["prompts"]
    ]


def load(path: Path) -> dict[str, Any]:
    """A contract. Raises UserError for a file that is none, or of another format."""
    place = path / NAME if path.is_dir() else path
    try:
        value = parse_line(place.read_bytes())
    except OSError as error:
        raise UserError(f"expected: {place} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"expected: {place} {error}; export the head again") from None
    rows = value.get("prompts") if isinstance(value, dict) else None
    keys = ("ids", "tokens", "text", "proposed", "accepted")
    if (
        not isinstance(rows, list)
        or not rows
        or value.get("format") != FORMAT
        or not all(isinstance(r, dict) and all(k in r for k in keys) for r in rows)
    ):
        raise UserError(f"expected: {place} is no contract of an export; export the head again")
    return value


def verdict(contract: dict[str, Any], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a server did against the contract.

    answers: per prompt `tokens` (None where it sends none), `text`, and where it tells them
    `drafts`, `draft_tokens` and `accepted` counts. served: answers and acceptance agree.
    parts: where they part first, in words; [] when they do not.
    """
    parts = []
    equal = 0
    for number, (row, answer) in enumerate(zip(contract["prompts"], answers, strict=True), 1):
        where = _parting(row, answer, set(contract["stop"]))
        equal += where is None
        if where is not None:
            parts.append(f"prompt {number}: {where}")
    counted = [a for a in answers if a.get("accepted") is not None]
    out: dict[str, Any] = {
        "answers": len(answers),
        "equal": equal,
        "parts": parts,
        "acceptance": None,
    }
    if len(counted) == len(answers):
        out["acceptance"] = _acceptance(contract, answers)
    out["served"] = equal == len(answers) and bool((out["acceptance"] or {}).get("equal"))
    return out


def _parting(row: dict[str, Any], answer: dict[str, Any], stop: set[int]) -> str | None:
    """Where an answer leaves the expected one; None when it does not."""
    if answer.get("tokens") is None:
        if answer["text"] == row["text"]:
            return None
        at = next(
            (
                i
                for i, (a, b) in enumerate(zip(row["text"], answer["text"], strict=False))
                if a != b
            ),
            min(len(row["text"]), len(answer["text"])),
        )
        return (
            f"the text parts at character {at}: {answer['text'][at : at + 20]!r} instead of "
            f"{row['text'][at : at + 20]!r}"
        )
    mine = [t for t in row["tokens"] if t not in stop]
    theirs = [t for t in answer["tokens"] if t not in stop]
    if mine == theirs:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
        min(len(mine), len(theirs)),
    )
    said = [str(side[at]) if at < len(side) else "the end" for side in (theirs, mine)]
    return f"token {at + 1} is {said[0]} instead of {said[1]}"


def _acceptance(contract: dict[str, Any], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accepted draft tokens, prompt by prompt, against the contract's."""
    mine = [sum(row["accepted"]) for row in contract["prompts"]]
    theirs = [int(a["accepted"]) for a in answers]
    offered = [sum(row["proposed"]) for row in contract["prompts"]]
    drafted = [int(a["draft_tokens"]) for a in answers]
    different = [
        number
        for number, pair in enumerate(
            zip(zip(mine, offered, strict=True), zip(theirs, drafted, strict=True), strict=True), 1
        )
        if pair[0] != pair[1]
    ]
    return {
        "accepted": {"expected": sum(mine), "server": sum(theirs)},
        "drafted": {"expected": sum(offered), "server": sum(drafted)},
        "different_prompts": different,
        "equal": not different,
    }
