"""Outside reference: a running server (vLLM, llama.cpp, any that takes and gives token ids) as
a row of the table, `NAME@http://HOST:PORT`, on the same prompts, interleaved with ours.

Every prompt is asked for its first token alone and then for the whole answer: the first is the
prefill, what the second takes longer is decoding. A server tells how much it accepted in all
(its answers or its counters), not where its cycles end.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.conf.errors import UserError
from outrider.decode.engine import Cycle, DecodedRun, Generation, Request, Timing
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.names import SERVER
from outrider.scripts.scoring.counters import read_counters, rise
from outrider.scripts.scoring.reference import room
from outrider.scripts.scoring.server_forms import VLLM, Reply, ServerRequest
from outrider.scripts.scoring.servers import SERVE, Endpoint

TRIES = 4
PATIENCE = 600.0  # seconds for one answer
SEEDS = 1 << 31  # llama.cpp takes no larger seeds


def server_of(name: str, url: str) -> Endpoint:
    """Return the server of a row."""
    return Endpoint(url, PATIENCE, setting=f"drafters: {name}", key_setting="")


async def _recognised(server: Endpoint) -> None:
    async with replace(server, retries=1):
        pass


def dead(drafters: Sequence[str]) -> list[str]:
    """Return a line for each server among the names of drafters that does not answer, before
    anything slow is begun for its sake."""
    found = []
    for server in filter(None, map(SERVER.fullmatch, drafters)):
        try:
            asyncio.run(_recognised(server_of(*server.groups())))
        except UserError as error:
            found.append(str(error))
    return found


class ServedSystem:
    """A server at `url`. Raises UserError when it is called and cannot be asked."""

    def __init__(self, target: Target, name: str, url: str) -> None:
        self.target = target
        self.server = server_of(name, url)
        self.where = f"drafters: {name}: {url}"

    def check(self) -> None:
        """Ask it for a token. Raises UserError when it cannot be asked, or does not answer as
        a row needs it."""

        async def ask() -> None:
            async with replace(self.server, retries=1) as door:
                self._tokens([0], await door.answer([0], ServerRequest(1)), 1)

        asyncio.run(ask())

    def __call__(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> DecodedRun:
        """Decode `requests`, all at the same time."""
        s, limits = sampling, [room(self.target, request) for request in requests]
        seeds = [(seed * 1_000_003 + request.id) % SEEDS for request in requests]
        asks = [
            ServerRequest(limit, s.temperature, s.top_k, s.top_p, s.min_p, seed)
            for limit, seed in zip(limits, seeds, strict=True)
        ]
        return asyncio.run(self._run(requests, asks))

    async def _run(self, requests: Sequence[Request], asks: Sequence[ServerRequest]) -> DecodedRun:
        async with self.server as door:
            await door.connect(len(requests))
            for _ in range(TRIES):
                failed = door.troubles
                first, _ = await requested(door, requests, [ServerRequest(1) for _ in asks])
                before = await door.metrics()
                whole, replies = await requested(door, requests, asks)
                after = await door.metrics()
                answers = [
                    self._tokens(request.prompt, reply, ask.limit)
                    for request, reply, ask in zip(requests, replies, asks, strict=True)
                ]
                longest = max(map(len, answers))
                if longest == 1:
                    first = whole  # nothing was decoded
                if longest == 1 or (whole > first and door.troubles == failed):
                    break
            else:
                raise UserError(
                    f"{self.where}: in {TRIES} tries no whole answer took longer than its first "
                    "token, or a question had to be asked again: nothing can be timed; give more "
                    "max_new_tokens, or look into the server's log"
                )
        told = accepted(replies, risen(door.kind, before, after), answers)
        cycles = [[] for _ in answers] if told is None else cycles_of(answers, told)
        passes = longest - 1 if told is None else max(map(len, cycles))
        timing = Timing(prefill_s=first, total_s=whole, cycles=passes)
        found = []
        for request, reply, tokens, of in zip(requests, replies, answers, cycles, strict=True):
            end, drafted = "eos" if reply.stopped else "length", [False] * len(tokens)
            found.append(Generation(list(request.prompt), tokens, of, drafted, end))
        return DecodedRun(found, timing)

    def _tokens(self, prompt: Sequence[int], reply: Reply, limit: int) -> list[int]:
        """Return the answer as ours are: with its stop token, which llama.cpp does not
        send. Raises UserError for one that cannot stand beside ours."""
        tokens, target = reply.tokens, self.target
        eos, most = target.eos_ids, target.vocab_size
        if tokens is None or (not tokens and not (reply.stopped and eos)):
            raise UserError(
                f"{self.where}: an answer came back without token ids; nothing can be counted or "
                f"compared: {SERVE}"
            )
        if wrong := [token for token in tokens if token >= most]:
            raise UserError(
                f"{self.where}: an answer holds token {wrong[0]}, and the target has {most}: the "
                "server runs another model; set target to that"
            )
        if len(tokens) > limit:
            raise UserError(f"{self.where}: asked {limit} tokens; {len(tokens)} came back; {SERVE}")
        if reply.ignored:
            raise UserError(
                f"{self.where}: it decoded otherwise than asked: {reply.ignored[0]}; ask for that, "
                "or start the server without settings of its own"
            )
        ended = bool(tokens) and tokens[-1] in eos
        missing = reply.stopped and eos and not ended and len(tokens) < limit
        return [*tokens, self._stop([*prompt, *tokens])] if missing else list(tokens)

    @torch.inference_mode()
    def _stop(self, ids: Sequence[int]) -> int:
        """Return the stop token behind these: of several the one that the target likes best."""
        row = torch.tensor([list(ids)], device=self.target.device)
        logits = self.target.model(row).logits[0, -1]
        return max(self.target.eos_ids, key=lambda token: float(logits[token]))


async def requested(
    door: Endpoint, requests: Sequence[Request], asks: Sequence[ServerRequest]
) -> tuple[float, list[Reply]]:
    """(seconds, answers) of all requests at the same time. The prompts are read anew: a server
    that kept them from the question before would seem to decode in no time."""
    fresh = [replace(ask, salt=secrets.token_hex(8)) for ask in asks]
    start = time.perf_counter()
    replies = await asyncio.gather(
        *(door.answer(list(r.prompt), ask) for r, ask in zip(requests, fresh, strict=True))
    )
    return time.perf_counter() - start, list(replies)


def risen(kind: str, before: str | None, after: str | None) -> int | None:
    """Return draft tokens that were accepted between two looks at a server's metrics; None where
    these do not tell."""
    if before is None or after is None:
        return None
    if read_counters(before) is None and read_counters(after) is None:
        return 0 if kind == VLLM else None  # which counts wherever it drafts
    found = rise(before, after).rose
    return None if found is None else int(found["accepted_tokens"])


def accepted(
    replies: Sequence[Reply], rose: int | None, answers: Sequence[Sequence[int]]
) -> list[int] | None:
    """Return accepted draft tokens of every answer; None where neither answers nor counters tell
    them. rose: of all together, by the counters: shared out by length."""
    own = [reply.accepted for reply in replies if reply.accepted is not None]
    if len(own) == len(replies):
        return own
    total = sum(map(len, answers))
    return None if rose is None else [round(rose * len(tokens) / total) for tokens in answers]


def cycles_of(answers: Sequence[Sequence[int]], accepted: Sequence[int]) -> list[list[Cycle]]:
    """As many cycles of every answer as its accepted tokens leave, all about equally long:
    their number is known, where one ends is not. The first token is the prefill's."""
    found = []
    for tokens, kept in zip(answers, accepted, strict=True):
        decoded = len(tokens) - 1
        count = max(decoded - kept, min(decoded, 1))
        ends = [1 + decoded * k // count for k in range(count + 1)] if count else [1]
        found.append(
            [
                Cycle(end - start - 1, end - start - 1, False, start)
                for start, end in zip(ends, ends[1:], strict=False)
            ]
        )
    return found
