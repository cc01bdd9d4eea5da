"""Acceptance as a contract: what an exported head is expected to do, in a file beside it, and
whether a running server does it.

`expected.json` holds prompts as token ids, the greedy answer behind each, and what our chain
of the exported numbers accepted there: an accepted stop token counts, what a draft holds behind
it does not; a draft never reaches beyond the length limit. Engines differ in the cycle that ends
an answer: vLLM counts what stands behind the stop token as well, llama.cpp not even that token
(`until_stop`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line
from outrider.decode import stats
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cycle, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target

NAME = "expected.json"
FORMAT = 1
EDGE = 0.02  # by which the end of an answer alone may move a rate


def expected(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], depth: int, limit: int
) -> dict[str, Any]:
    """The contract of a chain of `depth` over greedy answers of at most `limit` tokens.

    drafter: a chain drafter with the exported numbers. prompts: token ids, one or more each.
    """
    drafter.max_depth = drafter.max_nodes = depth
    requests = [Request(list(p), limit, id=i) for i, p in enumerate(prompts)]
    run = generate(target, drafter, requests, Sampling(), batch_size=len(requests))
    rows = []
    for request, found in zip(requests, run.generations, strict=True):
        rows.append(
            {
                "ids": list(request.prompt),
                "tokens": found.token_ids,
                "text": _text(target, found.token_ids),
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
    """Accepted length and unconditional acceptance by position with 95 % intervals, over the
    cycles that drafted: engines count no others."""
    drafted = [[c for c in row if c.proposed] for row in cycles]
    flat = [c for row in drafted for c in row]
    return {
        "cycles": len(flat),
        "accepted_length": stats.accepted_length(drafted).json(),
        "accepted_by_position": hits(flat),
        "acceptance_by_position": [whole.json() for _, whole in stats.position_intervals(drafted)],
    }


def hits(cycles: Sequence[Cycle]) -> list[int]:
    """How many cycles accepted draft position 1, 2, .."""
    deepest = max((c.proposed for c in cycles), default=0)
    return [sum(c.accepted > d for c in cycles) for d in range(deepest)]


def cycles_of(contract: dict[str, Any]) -> list[list[Cycle]]:
    """The cycles of every prompt as they were counted."""
    out = []
    for row in contract["prompts"]:
        cycles, start = [], 1  # the pass over the prompt gave a token
        for proposed, accepted in zip(row["proposed"], row["accepted"], strict=True):
            cycles.append(Cycle(proposed, accepted, (), False, start))
            start += accepted + 1
        out.append(cycles)
    return out


def until_stop(
    cycles: Sequence[Cycle], tokens: Sequence[int], stop: Collection[int]
) -> list[Cycle]:
    """The cycles of an answer `tokens` as an engine counts them for which an accepted token that
    ends the text is none."""
    out = []
    for cycle in cycles:
        drafted = tokens[cycle.start : cycle.start + cycle.accepted]
        before = next((i for i, token in enumerate(drafted) if token in stop), cycle.accepted)
        out.append(replace(cycle, accepted=before))
    return out


def load(path: Path) -> dict[str, Any]:
    """A contract. Raises UserError for a file that is none, or of another format."""
    place = path / NAME if path.is_dir() else path
    try:
        value = parse_line(place.read_bytes())
    except OSError as error:
        raise UserError(
            f"expected: {place} cannot be read ({error.strerror}); give the folder of an export"
        ) from None
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
    for number, row in enumerate(rows, 1):
        if not _counts(row):
            raise UserError(
                f"expected: {place}: prompt {number} holds tokens, proposed or accepted that are "
                "no counts of its cycles; export the head again"
            )
    return value


def _counts(row: dict[str, Any]) -> bool:
    """Whether a prompt's numbers are whole, from 0 on, and those of its cycles go together."""
    lists = [row[key] for key in ("ids", "tokens", "proposed", "accepted")]
    whole = all(isinstance(one, list) for one in lists) and all(
        type(value) is int and value >= 0 for one in lists for value in one
    )
    return (
        whole
        and len(row["proposed"]) == len(row["accepted"])
        and all(a <= p for p, a in zip(row["proposed"], row["accepted"], strict=True))
    )


def verdict(
    contract: dict[str, Any],
    answers: Sequence[dict[str, Any]],
    counters: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a server did against the contract.

    answers: per prompt `tokens` (None where it sends none), `text`, and `draft_tokens` and
    `accepted` where it tells them; then every prompt's counts must be the contract's. counters:
    what the server's own counters rose by, in their place: its rates must lie in the intervals,
    since engines differ at the end of an answer. served: answers and acceptance agree. parts:
    where answers part, in words; [] when they do not.
    """
    parts = []
    for number, (row, answer) in enumerate(zip(contract["prompts"], answers, strict=True), 1):
        where = _parting(row, answer, set(contract["stop"]))
        if where is not None:
            parts.append(f"prompt {number}: {where}")
    acceptance = None
    if all(a.get("accepted") is not None for a in answers):
        acceptance = _by_prompt(contract, answers, counters)
    elif counters is not None:
        acceptance = _by_counters(contract, counters)
    return {
        "answers": len(answers),
        "equal": len(answers) - len(parts),
        "parts": parts,
        "acceptance": acceptance,
        "served": not parts and acceptance is not None and acceptance["equal"],
    }


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


def _by_prompt(
    contract: dict[str, Any], answers: Sequence[dict[str, Any]], counters: dict[str, Any] | None
) -> dict[str, Any]:
    """Drafted and accepted tokens of every prompt against the contract's. llama.cpp alone tells
    them of every prompt, so they are counted as it does."""
    rows = zip(contract["prompts"], cycles_of(contract), strict=True)
    known = [until_stop(cycles, row["tokens"], contract["stop"]) for row, cycles in rows]
    mine = [(sum(c.proposed for c in cycles), sum(c.accepted for c in cycles)) for cycles in known]
    theirs = [(int(a["draft_tokens"]), int(a["accepted"])) for a in answers]
    unlike = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True), 1) if a != b]
    counted = (counters or {}).get("accepted_by_position", [])
    places = enumerate(zip(hits([c for row in known for c in row]), counted, strict=False), 1)
    place = next((d for d, (a, b) in places if a != b), None)
    return {
        "drafted": {"expected": sum(a for a, _ in mine), "server": sum(a for a, _ in theirs)},
        "accepted": {"expected": sum(b for _, b in mine), "server": sum(b for _, b in theirs)},
        "unlike_prompts": unlike,
        "position": place if unlike else None,
        "equal": not unlike,
    }


def _by_counters(contract: dict[str, Any], counters: dict[str, Any]) -> dict[str, Any]:
    """A server's rates against the contract's intervals."""
    drafts = counters["drafts"]
    length = contract["accepted_length"]
    found = 1 + counters["accepted_tokens"] / drafts
    place = None
    rows = zip(contract["acceptance_by_position"], counters["accepted_by_position"], strict=False)
    for position, (wanted, hits) in enumerate(rows, 1):
        if place is None and not _inside(hits / drafts, wanted):
            place = position
    cycles = contract["cycles"]
    return {
        "drafted": {
            "expected": sum(sum(row["proposed"]) for row in contract["prompts"]),
            "server": counters["draft_tokens"],
        },
        "accepted": {
            "expected": sum(sum(row["accepted"]) for row in contract["prompts"]),
            "server": counters["accepted_tokens"],
        },
        "accepted_length": {"expected": length, "server": found, "cycles": cycles},
        "unlike_prompts": None,
        "position": place,
        "equal": place is None and _inside(found, length),
    }


def _inside(value: float, interval: dict[str, Any]) -> bool:
    """Whether a rate lies in an interval; with one prompt there is none, and all do."""
    low, high = interval["low"], interval["high"]
    return low is None or high is None or low - EDGE <= value <= high + EDGE
