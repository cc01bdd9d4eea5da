"""Acceptance as a contract: what an exported head is expected to do, in a file beside it, and
whether a running server does it.

`expected.json` holds prompts as token ids, the greedy answer behind each, and what our chain
of the exported numbers accepted there: an accepted stop token counts, what a draft holds
behind it does not; a draft never reaches beyond the length limit. Engines differ in the cycle
that ends an answer: vLLM counts what stands behind the stop token as well, llama.cpp not even
that token (`until_stop`).

It was written in float32, and servers run in 16 bits. So it holds per prompt `rivals`: for
every token of the answer the tokens next to it, [[token, by how much its logit is below],
..], of which the first is the gap of the two best logits; and what 16 bits do to such gaps,
`rounding` (near_ties.py). An answer that parts at a rival within rounding["most"] parts at a
near tie, which is no fault unless it happens too often; what comes behind is not compared. A
file of version 0.2 has neither.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import parse_line
from outrider.decode import stats
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Cycle, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.exporting import near_ties
from outrider.scripts.scoring.servers import Reply

NAME = "expected.json"
FORMAT = 1
EDGE = 0.02  # by which the end of an answer alone may move a rate
HUGE = 1 << 31  # no number of a contract is that large


def expected(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], depth: int, limit: int
) -> dict[str, Any]:
    """The contract of a chain of `depth` over greedy answers of at most `limit` tokens.

    drafter: a chain drafter with the exported numbers. prompts: token ids, one or more each.
    """
    drafter.max_depth = drafter.max_nodes = depth
    requests = [Request(list(p), limit, id=i) for i, p in enumerate(prompts)]
    run = generate(target, drafter, requests, Sampling(), batch_size=len(requests))
    texts = [(found.prompt_ids, found.token_ids) for found in run.generations]
    rounding, rivals = near_ties.measured(target, texts)
    rows = []
    for request, found, others in zip(requests, run.generations, rivals, strict=True):
        rows.append(
            {
                "ids": list(request.prompt),
                "tokens": found.token_ids,
                "text": _text(target, found.token_ids),
                "proposed": [c.proposed for c in found.cycles],
                "accepted": [c.accepted for c in found.cycles],
                "rivals": others,
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
        "rounding": vars(rounding),
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


def up_to(cycles: Sequence[Cycle], limit: int) -> list[Cycle]:
    """The cycles of the same answer with at most `limit` tokens: the last token of a cycle is
    not drafted."""
    rooms = ((cycle, limit - cycle.start - 1) for cycle in cycles)
    return [
        replace(cycle, proposed=min(cycle.proposed, room), accepted=min(cycle.accepted, room))
        for cycle, room in rooms
        if room >= 0
    ]


def until_stop(
    cycles: Sequence[Cycle], tokens: Sequence[int], stop: Collection[int]
) -> list[Cycle]:
    """The cycles of an answer `tokens` as an engine counts them for which an accepted token
    that ends the text is none."""
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
        or not _settings(value)
        or not all(isinstance(r, dict) and all(k in r for k in keys) for r in rows)
    ):
        raise UserError(f"expected: {place} is no contract of an export; export the head again")
    for number, row in enumerate(rows, 1):
        if not _counts(row):
            raise UserError(
                f"expected: {place}: prompt {number} holds tokens, proposed or accepted that are "
                "no counts of its cycles; export the head again"
            )
        if "rounding" in value and not _rivalled(row):
            raise UserError(
                f"expected: {place}: prompt {number} holds rivals that are none of its tokens; "
                "export the head again"
            )
    return value | rates(cycles_of(value))


def _settings(value: dict[str, Any]) -> bool:
    """Whether a contract says how it is asked, and what 16 bits do, in numbers that can be."""
    stop, counts = value.get("stop"), ["max_new_tokens", "draft_tokens"]
    known = value.get("rounding", {"most": 0.0, "usual": 0.0, "places": 1})
    return (
        all(type(value.get(key)) is int and 0 < value[key] < HUGE for key in counts)
        and isinstance(stop, list)
        and all(type(token) is int for token in stop)
        and isinstance(known, dict)
        and known.keys() == {"most", "usual", "places"}
        and all(type(known[key]) is float and 0 <= known[key] < HUGE for key in ("most", "usual"))
        and type(known["places"]) is int
        and known["places"] > 0
    )


def _rivalled(row: dict[str, Any]) -> bool:
    """Whether every token of a prompt has a rival or more: a token and a distance."""
    rivals = row.get("rivals")
    return (
        isinstance(rivals, list)
        and len(rivals) == len(row["tokens"])
        and all(isinstance(some, list) and some for some in rivals)
        and all(
            isinstance(one, list) and [*map(type, one)] == [int, float] and 0 <= one[1] < HUGE
            for some in rivals
            for one in some
        )
    )


def _counts(row: dict[str, Any]) -> bool:
    """Whether a prompt's numbers are whole, from 0 on, and those of its cycles go together."""
    lists = [row[key] for key in ("ids", "tokens", "proposed", "accepted")]
    whole = all(isinstance(one, list) for one in lists) and all(
        type(value) is int and 0 <= value < HUGE for one in lists for value in one
    )
    return (
        whole
        and isinstance(row["text"], str)
        and row["ids"] != []
        and len(row["proposed"]) == len(row["accepted"])
        and all(a <= p for p, a in zip(row["proposed"], row["accepted"], strict=True))
    )


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the expected one. alike: tokens before. gap: of the two best
    logits there, None where that is not known. near: 16 bits may choose so; else it is a
    fault."""

    alike: int
    said: str
    gap: float | None = None
    near: bool = False


def rounding(contract: dict[str, Any]) -> near_ties.Rounding | None:
    """What 16 bits do to its target; None where it does not tell."""
    return near_ties.Rounding(**contract["rounding"]) if "rounding" in contract else None


def parting(
    contract: dict[str, Any], row: dict[str, Any], answer: Reply, limit: int
) -> Parting | None:
    """Where the answer behind a prompt `row`, of at most `limit` tokens, leaves the expected
    one; None where it does not."""
    if answer.tokens is None:
        return _parting_text(row["text"], answer.text)
    stop = set(contract["stop"])
    expected = row["tokens"][:limit]
    mine, theirs = ([t for t in side if t not in stop] for side in (expected, answer.tokens))
    if mine == theirs:
        return None
    at = _first(mine, theirs)
    here, there = ([*map(str, side)][at : at + 1] or ["the end"] for side in (mine, theirs))
    said = f"token {at + 1} is {there[0]} instead of {here[0]}"
    known = rounding(contract)
    if known is None or at >= len(expected):
        return Parting(at, said)
    rivals = row["rivals"][at]
    chosen = {theirs[at]} if at < len(theirs) else stop if answer.stopped else set()
    gap = next((gap for token, gap in rivals if token in chosen), None)
    lead = f"by {rivals[0][1]:.2g} or more" if gap is None else f"by {gap:.2g}"
    said += f", whose logit leads {lead}; 16 bits move {known.most:.2g}"
    return Parting(at, said, gap, gap is not None and gap <= known.most)


def gaps(row: dict[str, Any]) -> list[float]:
    """Of the two best logits at every token of a prompt's answer."""
    return [rivals[0][1] for rivals in row["rivals"]]


def _parting_text(mine: str, theirs: str) -> Parting | None:
    if mine == theirs:
        return None
    at = _first(mine, theirs)
    said = f"{theirs[at : at + 20]!r} instead of {mine[at : at + 20]!r}"
    return Parting(0, f"the text parts at character {at}: {said} (it tells no token ids)")


def _first(mine: Sequence[Any], theirs: Sequence[Any]) -> int:
    """The first place where they differ."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))


@dataclass(frozen=True)
class Piece:
    """An answer, or its part before a near tie, that is the expected one of `prompt` (from 0)
    with `limit` tokens: what the server counted there. drafts: cycles that drafted, None
    where it does not tell them; by_position: how many of them accepted draft token 1, 2, ..,
    [] as well."""

    prompt: int
    limit: int
    drafted: int
    accepted: int
    drafts: int | None
    by_position: Sequence[int] = ()


def acceptance(contract: dict[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
    """Drafted and accepted tokens of one piece or more beside the contract's.

    equal: the rates lie within the contract's intervals, since engines differ at the end of
    an answer and 16 bits turn draft tokens too. position: the first draft token whose rate
    does not. unlike_prompts: those with other counts.
    """
    known = [_known(contract, piece) for piece in pieces]
    mine = [(sum(c.proposed for c in cs), sum(c.accepted for c in cs)) for cs in known]
    theirs = [(piece.drafted, piece.accepted) for piece in pieces]
    pairs = zip(pieces, mine, theirs, strict=True)
    accepted = sum(b for _, b in theirs)
    cycles = sum(c.proposed > 0 for cs in known for c in cs)
    # where they are not told: as many tokens, so a draft token less is a cycle more
    told = [piece.drafts for piece in pieces if piece.drafts is not None]
    drafts = max(1, sum(told) if told else cycles + sum(b for _, b in mine) - accepted)
    whole = known == cycles_of(contract)
    wanted = contract if whole else rates(known)
    # an end weighs more where fewer cycles come before it
    share = contract["cycles"] * len(pieces) / len(contract["prompts"]) / max(cycles, 1)
    edge = EDGE * share + _turned(contract, pieces, cycles)
    longest = max((c.proposed for cs in known for c in cs), default=0)
    inside = functools.partial(_inside, edge=edge, alone=longest / max(cycles, 1))
    counted = [sum(at) for at in zip_longest(*(p.by_position for p in pieces), fillvalue=0)]
    positions = enumerate(zip(wanted["acceptance_by_position"], counted, strict=False), 1)
    place = next((d for d, (rate, n) in positions if not inside(n / drafts, rate)), None)
    length = 1 + accepted / drafts
    return {
        "answers": len(pieces),
        "drafted": {"expected": sum(a for a, _ in mine), "server": sum(a for a, _ in theirs)},
        "accepted": {"expected": sum(b for _, b in mine), "server": accepted},
        "accepted_length": {"expected": wanted["accepted_length"], "server": length},
        "unlike_prompts": [piece.prompt + 1 for piece, a, b in pairs if a != b],
        "position": place,
        "equal": place is None and inside(length, wanted["accepted_length"]),
    }


def _turned(contract: dict[str, Any], pieces: Sequence[Piece], cycles: int) -> float:
    """The most by which 16 bits move a rate over so many cycles, when they turn draft tokens
    as often as the target's own: three standard deviations above the mean."""
    known = rounding(contract)
    if known is None:
        return 0.0
    rows = (gaps(contract["prompts"][piece.prompt])[: piece.limit] for piece in pieces)
    every = [known.turned(gap) for row in rows for gap in row]
    mean = sum(every) / len(every)
    return mean + 3 * math.sqrt(mean / max(cycles, 1))


def _known(contract: dict[str, Any], piece: Piece) -> list[Cycle]:
    """The contract's cycles of a piece, as its server counts them."""
    row = contract["prompts"][piece.prompt]
    cycles = cycles_of(contract)[piece.prompt]
    if piece.limit < len(row["tokens"]):
        cycles = up_to(cycles, piece.limit)
    if piece.drafts is not None:
        return cycles
    return until_stop(cycles, row["tokens"], contract["stop"])  # llama.cpp


def _inside(value: float, interval: dict[str, Any], edge: float, alone: float) -> bool:
    """Whether a rate lies in an interval. One prompt has none: there a cycle's draft,
    `alone`, may be counted otherwise."""
    low, high = interval["low"], interval["high"]
    if low is None or high is None:
        return abs(value - float(interval["mean"])) <= edge + alone
    return bool(low - edge <= value <= high + edge)
