"""Outside reference: a running server (vLLM, llama.cpp, any that takes and gives token ids) as a
row of the table, `NAME@http://HOST:PORT`, on the same prompts and in turns with ours.

Every prompt is asked for its first token alone and then for the whole answer: the first is the
prefill, what the second takes longer is decoding. A server tells how much it accepted in all
(its answers or its counters), not where its cycles end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from conf.errors import UserError
from decode.engine import Cycle, Generation, Request, Run, Timing
from decode.sampling import Sampling
from decode.target import Target
from scripts.scoring.reference import room
from scripts.serving.asking import Address, Ask, Door, Reply

TRIES = 4
PATIENCE = 600.0  # seconds for one answer


class Served:
    """A server at `url`. Raises UserError when it is called and cannot be asked."""

    def __init__(self, target: Target, name: str, url: str) -> None:
        self.target, self.name = target, name
        self.address = Address(url, PATIENCE, setting=f"drafters: {name}")

    def __call__(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> Run:
        """Decode `requests`, all at the same time."""
        if sampling.repetition_penalty != 1 or sampling.processors:
            raise UserError(
                f"drafters: {self.name}: a server is asked without repetition_penalty and logits "
                "processors; leave these or the server out"
            )
        return asyncio.run(self._run(requests, sampling, seed))

    async def _run(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> Run:
        s, limits = sampling, [room(self.target, request) for request in requests]
        asks = [
            Ask(limit, s.temperature, s.top_k, s.top_p, s.min_p, seed * 1_000_003 + request.id)
            for request, limit in zip(requests, limits, strict=True)
        ]
        async with Door(self._address(len(requests))) as door:
            for _ in range(TRIES):
                short, _first = await asked(door, requests, [Ask(1) for _ in asks])
                before = await door.counters()
                whole, replies = await asked(door, requests, asks)
                after = await door.counters()
                if whole > short or max(limits) == 1:
                    break
            else:
                raise UserError(
                    f"drafters: {self.name}: {door.root}: whole answers took {whole:.3g} s, their "
                    f"first tokens {short:.3g} s: nothing can be timed; give more max_new_tokens"
                )
        rose = None
        if before is not None and after is not None:
            rose = after["accepted_tokens"] - before["accepted_tokens"]
        answers = [self._tokens(reply) for reply in replies]
        cycles = cycles_of(answers, accepted(replies, rose, answers))
        timing = Timing(
            prefill_s=min(short, whole),
            total_s=whole,
            cycles=max(map(len, cycles), default=0),
        )
        found = [
            Generation(
                list(request.prompt),
                tokens,
                of,
                [False] * len(tokens),
                "eos" if reply.stopped else "length",
            )
            for request, reply, tokens, of in zip(requests, replies, answers, cycles, strict=True)
        ]
        return Run(found, timing, law_rows=0)

    def _address(self, connections: int) -> Address:
        given = self.address
        return Address(given.url, given.timeout, connections=connections, setting=given.setting)

    def _tokens(self, reply: Reply) -> list[int]:
        """The answer as ours are: with its stop token, which llama.cpp does not send."""
        if not reply.tokens:
            raise UserError(
                f"drafters: {self.name}: an answer came back without token ids; nothing can be "
                "counted or compared"
            )
        eos = self.target.eos_ids
        missing = reply.stopped and eos and reply.tokens[-1] not in eos
        return [*reply.tokens, *([eos[0]] if missing else [])]


async def asked(
    door: Door, requests: Sequence[Request], asks: Sequence[Ask]
) -> tuple[float, list[Reply]]:
    """(seconds, answers) of all requests at the same time."""
    start = time.perf_counter()
    replies = await asyncio.gather(
        *(door.answer(list(r.prompt), ask) for r, ask in zip(requests, asks, strict=True))
    )
    return time.perf_counter() - start, list(replies)


def accepted(
    replies: Sequence[Reply], rose: int | None, answers: Sequence[Sequence[int]]
) -> list[int]:
    """Accepted draft tokens of every answer. rose: of all together, by the server's counters:
    shared out by length where the answers do not tell their own."""
    own = [reply.accepted for reply in replies]
    if all(count is not None for count in own):
        return [count or 0 for count in own]
    total = sum(map(len, answers))
    return [round((rose or 0) * len(tokens) / total) for tokens in answers]


def cycles_of(answers: Sequence[Sequence[int]], accepted: Sequence[int]) -> list[list[Cycle]]:
    """As many cycles of every answer as its accepted tokens leave, all about equally long: their
    number is known, where one ends is not. The first token is the prefill's."""
    found = []
    for tokens, kept in zip(answers, accepted, strict=True):
        decoded = len(tokens) - 1
        count = max(decoded - kept, min(decoded, 1))
        ends = [1 + decoded * k // count for k in range(count + 1)] if count else [1]
        found.append(
            [
                Cycle(end - start - 1, end - start - 1, (0,) * (end - start - 1), False, start)
                for start, end in zip(ends, ends[1:], strict=False)
            ]
        )
    return found
