"""Two minutes with a running server: is its temperature the one that was asked for, are its
answers the model's, do they depend on how many are asked for together?
(scripts/certificate/server_judged.py has the tests.)

Short answers are asked for, one and several at a time, at two temperatures. Then every answer
goes back as a prompt, one at a time, and the server tells the model's likeliest tokens at
every place: nothing is drafted there, and nothing of this repository's stands in for the
model. A server that can tell one place at a time alone is taken at its word about the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.certificate import server_judged
from outrider.scripts.certificate.server_places import JudgedAnswer
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.scoring.counters import rise
from outrider.scripts.scoring.servers import (
    LLAMACPP,
    SERVE,
    VLLM,
    Address,
    Endpoint,
    Reply,
    ServerRequest,
)

BEST = 20  # likeliest tokens of a place; engines tell no more by default
CUT, NUCLEUS = 16, 0.9  # top_k and top_p: their edges lie among the BEST likeliest
COOLER = 0.6  # the second temperature, in the first one
LIMIT = 25  # tokens of an answer
PROMPTS = 8  # asked again and again: a cache shows
JUDGING = 4.0  # seconds that are left for the tests
COUNTING = 2.0  # seconds for a page of counters
SEEDS = 1 << 31
STEP = 8  # places between two that are scored again
# Nats by which one distribution may be off the other (Kullback-Leibler) on average. Two ways
# to compute a logit in bfloat16 differ by up to 2 units in the last place
# (scoring/same_tokens.py), 0.25 where logits are below 32; so much noise on every logit moves a
# distribution by half of its square.
CLOSE = 0.25**2 / 2
MOST = 14.0  # nats between two log-probabilities of a token: one says as good as never


@dataclass(frozen=True)
class ServerPlan:
    """tokens: sampled ones, most. seconds: of everything. levels: requests at a time."""

    address: Address
    prompts: Sequence[str]
    temperature: float
    tokens: int
    seconds: float
    levels: tuple[int, ...]
    alpha: float
    seed: int


@dataclass
class _Kind:
    """Answers of one temperature and one number of requests. share: tokens that are wanted. off:
    of the places that were scored again, by how much what came with the answer differs, nats."""

    level: int
    temperature: float
    top_k: int
    top_p: float
    share: float
    have: int = 0
    off: list[float] = field(default_factory=list)


@dataclass
class _Collected:
    """What came back so far. drafted: draft tokens that the answers themselves tell. mistold: by
    how many nats the log-probabilities that come with them are off the model's, 0 for rounding."""

    answers: list[JudgedAnswer] = field(default_factory=list)
    drafted: int = 0
    notes: set[str] = field(default_factory=set)
    ended: int = 0
    late: bool = False
    mistold: float = 0.0


def judged(plan: ServerPlan, on_progress: OnProgress) -> dict[str, Any]:
    """Ask and judge: what certificate.json holds.

    Raises UserError for a server that cannot be asked, or that tells no log-probabilities.
    """
    began = time.monotonic()
    collected, about = asyncio.run(_ask(plan, began, on_progress))
    found = server_judged.judged(collected.answers, BEST, plan.alpha, plan.seed)
    notes = sorted(collected.notes)
    notes += [f"{name} is not taken into account" for name in found["ignored"]]
    if about["drafted"] == 0:
        notes.append("the server drafted nothing: nothing was tested of speculation")
    if collected.mistold:
        notes.append(
            "the log-probabilities that come with an answer are not the model's: off by "
            f"{collected.mistold:.2g} nats, 16 bits explain {CLOSE:.2g}; all were scored again"
        )
    if collected.late:
        notes.append(f"seconds={plan.seconds:g} were over before {plan.tokens:,} tokens came")
    return {
        **found,
        "server": about,
        "notes": notes,
        "untested": _untested(collected, about),
        "seconds": round(time.monotonic() - began, 1),
    }


def _kinds(plan: ServerPlan) -> list[_Kind]:
    """A third of the tokens at the temperature among the CUT likeliest, a third in a nucleus, a
    third cooler and without any truncation, as most requests are."""
    each = plan.tokens / len(plan.levels) / 3
    hows = ((1.0, CUT, 1.0), (1.0, 0, NUCLEUS), (COOLER, 0, 1.0))
    return [
        _Kind(level, plan.temperature * heat, top_k, top_p, each)
        for level in plan.levels
        for heat, top_k, top_p in hows
    ]


async def _ask(
    plan: ServerPlan, began: float, on_progress: OnProgress
) -> tuple[_Collected, dict[str, Any]]:
    collected, end = _Collected(), began + plan.seconds - JUDGING
    async with contextlib.AsyncExitStack() as stack:
        server = Endpoint(plan.address)
        try:
            await asyncio.wait_for(stack.enter_async_context(server), _left(end))
        except TimeoutError:
            raise UserError(
                f"seconds: {plan.seconds:g} went by before {server.root} had told its model; look "
                "into the server's log"
            ) from None
        before = await _metrics(server)
        try:
            await asyncio.wait_for(_waves(server, plan, collected, on_progress), _left(end))
        except TimeoutError:
            collected.late = True
        found = rise(before, await _metrics(server), ("draft_tokens",))
    if not collected.answers:
        raise UserError(
            f"seconds: {plan.seconds:g} went by without one whole answer of {server.root}; give "
            "seconds=120, or ask a faster server"
        )
    drafted = (collected.drafted or None) if found.rose is None else found.rose["draft_tokens"]
    about = {"url": plan.address.url, "kind": server.kind, "model": server.model}
    return collected, about | {"drafted": drafted}


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.1)


async def _metrics(server: Endpoint) -> str | None:
    """The server's counters, where it tells them soon."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(server.metrics(), COUNTING)
    return None


async def _waves(
    server: Endpoint, plan: ServerPlan, collected: _Collected, on_progress: OnProgress
) -> None:
    """Wave by wave, that which lacks most first; each is scored before the next one, so that
    what there is when time is over is spread evenly."""
    texts = [plan.prompts[i % len(plan.prompts)] for i in range(PROMPTS)]
    prompts = await asyncio.gather(*map(server.tokenized, texts))
    kinds, number, wave = _kinds(plan), 0, 0
    while True:
        left = plan.tokens - sum(kind.have for kind in kinds)
        if not (fit := [kind for kind in kinds if kind.level <= left]):
            return
        kind = min(fit, key=lambda k: k.have / k.share)
        limit = min(LIMIT, left // kind.level)
        stop = _stop(server, kind, collected)
        some = [prompts[(number + i) % PROMPTS] for i in range(kind.level)]
        requests = [
            ServerRequest(
                limit,
                kind.temperature,
                kind.top_k,
                kind.top_p,
                top=BEST,
                stop=stop,
                seed=(plan.seed * 1_000_003 + number + i) % SEEDS,
            )
            for i in range(kind.level)
        ]
        replies = await asyncio.gather(*map(server.answer, some, requests))
        collected.drafted += sum(reply.drafted or 0 for reply in replies)
        for prompt, reply in zip(some, replies, strict=True):
            tokens = _tokens(server, reply, limit, collected)
            rows = await _rows(server, prompt, tokens, reply, kind, collected)
            some_rows = [*map(_likeliest, rows, tokens)]
            how = (kind.temperature, kind.top_k, kind.level, wave, kind.top_p, stop)
            if set(tokens[:-1]) & set(stop):
                collected.notes.add("stop_token_ids is not taken into account")
            collected.answers.append(JudgedAnswer(prompt, tokens, some_rows, *how))
            kind.have += max(len(tokens), 1)
        _refuse_silence(server, collected)
        number, wave = number + kind.level, wave + 1
        on_progress(sum(k.have for k in kinds), plan.tokens, "tokens")


def _stop(server: Endpoint, kind: _Kind, collected: _Collected) -> tuple[int, ...]:
    """The commonest token so far, where answers without any truncation are to end at it: of vLLM
    alone it is known that the token stands in the answer."""
    if server.kind != VLLM or kind.top_k or kind.top_p < 1:
        return ()
    seen = Counter(token for answer in collected.answers for token in answer.tokens)
    return tuple(token for token, _ in seen.most_common(1))


async def _rows(
    server: Endpoint,
    prompt: list[int],
    tokens: list[int],
    reply: Reply,
    kind: _Kind,
    collected: _Collected,
) -> list[dict[int, float]]:
    """The likeliest tokens at every place: those that came with the answer where a part of
    them, scored again, is the same but for rounding; else all scored again."""
    text, given = [*prompt, *tokens], None if collected.mistold else reply.rows
    if given is None:
        return await server.distributions(text, len(prompt), BEST)
    for place in range(len(collected.answers) % STEP, len(tokens), STEP):
        again = await server.next_distribution(text[: len(prompt) + place], BEST)
        kind.off.append(divergence(again, given[place]))
    if kind.off and (off := sum(kind.off) / len(kind.off)) > CLOSE:
        collected.mistold = off
        return await server.distributions(text, len(prompt), BEST)
    return given


def divergence(of: dict[int, float], told: dict[int, float]) -> float:
    """How far `told` is off `of`, both {token: log-probability} of one place: the Kullback-Leibler
    divergence in nats, >= 0, over the tokens of both and all others as one. An unlikely token
    counts by how likely it is, so that rounding, which moves every logit alike, moves this by its
    square alone."""
    both = [(of[token], told[token]) for token in of.keys() & told.keys()]
    if not both:
        return MOST
    mass = [math.fsum(map(math.exp, side)) for side in zip(*both, strict=True)]
    beyond = [math.log(max(1 - some, math.exp(-MOST))) for some in mass]
    pairs = [*both, (beyond[0], beyond[1])]
    return math.fsum(math.exp(a) * min(a - b, MOST) for a, b in pairs if a > -math.inf)


def _likeliest(row: dict[int, float], token: int) -> dict[int, float]:
    """Of a place, and the answer's own token: a server may send thousands."""
    if len(row) <= BEST + 1:
        return row
    best = heapq.nsmallest(BEST, row, key=lambda t: (-row[t], t))
    return {t: row[t] for t in (*best, token) if t in row}


def _refuse_silence(server: Endpoint, collected: _Collected) -> None:
    """Raises UserError where nothing but empty answers came so far."""
    count = len(collected.answers)
    if count >= PROMPTS and not any(answer.tokens for answer in collected.answers):
        raise UserError(
            f"url: {server.root}: asked {count} answers; all came back empty; give other prompts, "
            "or look for a limit or stop word of the server's own"
        )


def _tokens(server: Endpoint, reply: Reply, limit: int, collected: _Collected) -> list[int]:
    """Of an answer. Raises UserError where it holds text alone, or more than `limit`."""
    if reply.tokens is None:
        raise UserError(
            f"url: {server.root}: asked return_token_ids; the answer holds text alone, which more "
            f"than one sequence of tokens can spell; {SERVE}"
        )
    if len(reply.tokens) > limit:
        raise UserError(
            f"url: {server.root}: asked {limit} tokens; {len(reply.tokens)} came back; {SERVE}"
        )
    collected.notes.update(reply.ignored)
    collected.ended += reply.stopped
    return list(reply.tokens)


def _untested(collected: _Collected, about: dict[str, Any]) -> list[str]:
    """What a short run and a server's own words do not show."""
    out = [
        f"tokens beyond the {BEST} likeliest of a place, but for how often they come",
        "weights, template and tokenizer: the server's own log-probabilities stand for the model",
        "small biases: `tokens` and `seconds` set higher find smaller ones",
        "greedy answers (temperature=0), penalties, min_p",
    ]
    if about["drafted"] is None:
        out.append("how much was drafted: the server does not tell")
    if collected.ended and about["kind"] == LLAMACPP:
        out.append("the token that ends an answer: the server leaves it out")
    return out
