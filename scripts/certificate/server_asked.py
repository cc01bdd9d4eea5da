"""Two minutes with a running server: is its temperature the one that was asked for, are its
answers the model's, do they depend on how many are asked for together? (server_judged.py has
the tests.)

Short answers are asked for, one and several at a time, at two temperatures. Then every
answer goes back as a prompt, one at a time, and the server returns the model's likeliest
tokens at every place: nothing is drafted there, and nothing of this repository's is in
for the model.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.certificate import server_judged
from outrider.scripts.certificate.config import (
    ANSWER,
    RETRIES,
    URL_ALPHA,
    URL_TOKENS,
    CertifyConfig,
)
from outrider.scripts.certificate.server_places import JudgedAnswer
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.scoring.counters import rise
from outrider.scripts.scoring.server_forms import VLLM, Reply, ServerRequest
from outrider.scripts.scoring.servers import SERVE, Endpoint

BEST = 20  # likeliest tokens of a place; engines tell no more by default
CUT, NUCLEUS = 16, 0.9  # top_k and top_p: their edges lie among the BEST likeliest
COOLER = 0.6  # the second temperature, in the first one
LIMIT = 25  # tokens of an answer
PROMPTS = 8  # asked again and again: a cache shows
JUDGING = 4.0  # seconds that are left for the tests
SEEDS = 1 << 31
UNTESTED = [
    f"tokens beyond the {BEST} likeliest of a place, but for how often they come",
    "weights, template and tokenizer: the server's own log-probabilities stand for the model",
    "small biases: `tokens` and `seconds` set higher find smaller ones",
    "greedy answers (temperature=0), penalties, min_p",
]


@dataclass
class _Collected:
    """What came back so far. drafted: draft tokens that the answers themselves tell."""

    answers: list[JudgedAnswer] = field(default_factory=list)
    drafted: int = 0
    notes: set[str] = field(default_factory=set)


def judged(cfg: CertifyConfig, prompts: Sequence[str], on_progress: OnProgress) -> dict[str, Any]:
    """Ask and judge: what certificate.json holds.

    Raises UserError for a server that cannot be asked, or that returns no log-probabilities.
    """
    began = time.monotonic()
    collected, about = asyncio.run(_ask(cfg, prompts, on_progress))
    found = server_judged.judged(collected.answers, BEST, cfg.alpha or URL_ALPHA, cfg.seed)
    notes = sorted(collected.notes)
    notes += [f"{name} is not taken into account" for name in found["ignored"]]
    if about["drafted"] == 0:
        notes.append("the server drafted nothing: nothing was tested of speculation")
    if about["drafted"] is None:
        notes.append("how much was drafted: the server does not tell")
    seconds = round(time.monotonic() - began, 1)
    return {**found, "server": about, "notes": notes, "untested": UNTESTED, "seconds": seconds}


async def _ask(
    cfg: CertifyConfig, prompts: Sequence[str], on_progress: OnProgress
) -> tuple[_Collected, dict[str, Any]]:
    server = Endpoint(cfg.url, min(ANSWER, cfg.seconds), RETRIES, cfg.key_env)
    collected = _Collected()
    before = after = None
    try:
        async with asyncio.timeout(cfg.seconds - JUDGING), server:
            before = await server.metrics()
            await _waves(server, cfg, prompts, collected, on_progress)
            after = await server.metrics()
    except TimeoutError:
        late = f"seconds={cfg.seconds:g} were over before {cfg.tokens or URL_TOKENS:,} tokens came"
        collected.notes.add(late)
    if not collected.answers:
        raise UserError(
            f"seconds: {cfg.seconds:g} went by without one whole answer of {server.root}; give "
            "seconds=120, ask a faster server, or look into its log"
        )
    found = rise(before, after).rose
    drafted = (collected.drafted or None) if found is None else found["draft_tokens"]
    about = {"url": server.url, "kind": server.kind, "model": server.model}
    return collected, about | {"drafted": drafted}


async def _waves(
    server: Endpoint,
    cfg: CertifyConfig,
    texts: Sequence[str],
    collected: _Collected,
    on_progress: OnProgress,
) -> None:
    """Wave by wave, that which lacks most first; each is scored before the next one, so that
    what there is when time is over is spread evenly.

    A third of the tokens at the temperature among the CUT likeliest, a third in a nucleus,
    a third cooler and without any truncation, as most requests are."""
    most = cfg.tokens or URL_TOKENS
    some = [texts[i % len(texts)] for i in range(PROMPTS)]
    prompts = await asyncio.gather(*map(server.tokenized, some))
    hows = ((1.0, CUT, 1.0), (1.0, 0, NUCLEUS), (COOLER, 0, 1.0))
    have = dict.fromkeys(itertools.product(sorted({*cfg.at_a_time}), hows), 0)  # tokens of each
    number, wave, answers = 0, 0, collected.answers
    while True:
        left = most - sum(have.values())
        on_progress(most - left, most, "tokens")
        if not (fit := [kind for kind in have if kind[0] <= left]):
            return
        level, (heat, top_k, top_p) = kind = min(fit, key=lambda kind: have[kind])
        limit = min(LIMIT, left // level)
        stop = () if top_k or top_p < 1 else _stop(server, answers)
        how: dict[str, Any] = {"temperature": cfg.temperature * heat, "top_k": top_k}
        how |= {"top_p": top_p, "stop": stop}
        asked = [prompts[(number + i) % PROMPTS] for i in range(level)]
        seeds = [(cfg.seed * 1_000_003 + number + i) % SEEDS for i in range(level)]
        requests = [ServerRequest(limit, **how, seed=seed) for seed in seeds]
        for prompt, reply in zip(
            asked, await asyncio.gather(*map(server.answer, asked, requests)), strict=True
        ):
            tokens = _tokens(server, reply, limit, stop, collected)
            rows = await server.distributions([*prompt, *tokens], len(prompt), BEST)
            answers.append(JudgedAnswer(prompt, tokens, rows, **how, level=level, wave=wave))
            have[kind] += max(len(tokens), 1)
        if len(answers) >= PROMPTS and not any(answer.tokens for answer in answers):
            raise UserError(
                f"url: {server.root}: asked {len(answers)} answers; all came back empty; "
                "give other prompts, or look for a limit or stop word of the server's own"
            )
        number, wave = number + level, wave + 1


def _stop(server: Endpoint, answers: Sequence[JudgedAnswer]) -> tuple[int, ...]:
    """Return the commonest token so far, at which untruncated answers are to end: of vLLM
    alone it is known that the token is in the answer."""
    seen = Counter(token for answer in answers for token in answer.tokens)
    return tuple(token for token, _ in seen.most_common(1)) if server.kind == VLLM else ()


def _tokens(
    server: Endpoint, reply: Reply, limit: int, stop: tuple[int, ...], collected: _Collected
) -> list[int]:
    """Return the token ids of an answer. Raises UserError where it holds text alone, or
    more than `limit`."""
    if reply.tokens is None:
        raise UserError(
            f"url: {server.root}: asked return_token_ids; the answer holds text alone, which more "
            f"than one sequence of tokens can spell; {SERVE}"
        )
    if len(reply.tokens) > limit:
        raise UserError(
            f"url: {server.root}: asked {limit} tokens; {len(reply.tokens)} came back; {SERVE}"
        )
    if set(reply.tokens[:-1]) & set(stop):
        collected.notes.add("stop_token_ids is not taken into account")
    collected.notes.update(reply.ignored)
    collected.drafted += reply.drafted or 0
    return list(reply.tokens)
