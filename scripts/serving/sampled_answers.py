"""Answers of a running server for a certificate: asked in waves of 1, 2 and 8 at a time, kept
as they come, so that a killed run goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.sampling import Sampling
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.served import SampledAnswer
from outrider.scripts.serving.asking import SERVE, Address, Endpoint, Reply, ServerRequest
from outrider.scripts.serving.counters import rise

SEEDS = 1 << 31
Approve = Callable[[list[SampledAnswer]], None]


@dataclass(frozen=True)
class SampleJob:
    """What to ask for. tokens: sampled ones, spread evenly over `levels`; greedy: prompts that
    are answered greedily at each level; limit: most tokens of an answer."""

    address: Address
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    tokens: int
    limit: int
    greedy: int
    levels: tuple[int, ...]
    vocab: int
    stops: frozenset[int]
    seed: int


@dataclass
class SampledResponse:
    """What came back. drafted: draft tokens, None where the server does not tell. notes: what
    it did otherwise than asked, or did not tell. doubt: what is wrong with the counters that
    `drafted` would come from."""

    kind: str
    sampled: list[SampledAnswer]
    greedy: list[SampledAnswer]
    drafted: int | None
    notes: list[str]
    doubt: str = ""


def ask_all(
    job: SampleJob, memo: Memo, on_progress: OnProgress, approve: Approve
) -> SampledResponse:
    """Every answer, those of an earlier run first. approve: sees the greedy answers before
    anything is sampled, and may raise.

    Raises UserError for a server that cannot be judged.
    """
    return asyncio.run(_ask_all(job, memo, on_progress, approve))


async def _ask_all(
    job: SampleJob, memo: Memo, on_progress: OnProgress, approve: Approve
) -> SampledResponse:
    async with Endpoint(job.address) as door:
        before, known = await door.metrics(), _answers(memo)
        greedy = await _greedy(door, job, memo, on_progress)
        await asyncio.to_thread(approve, greedy)
        sampled = [] if job.sampling.greedy else await _sampled(door, job, memo, on_progress)
        if sampled:
            await memo_once(memo, "seeds", _seeds(door, job))
        found = rise(before, await door.metrics(), ("draft_tokens",))
    if found.rose is not None or found.why:
        made = found.rose["draft_tokens"] if found.rose else 0
        new = _answers(memo) - known
        memo.add("counted", {"answers": new, "drafted": made, "doubt": found.why})
    rows = [*memo.lines("greedy"), *memo.lines("sampled")]
    message = [row["drafted"] for row in rows if row["drafted"] is not None]
    doubt = "" if message else next((r["doubt"] for r in memo.lines("counted") if r["doubt"]), "")
    drafted = sum(message) if message else None if doubt else _counted(memo)
    notes = sorted({note for row in rows for note in row["ignored"]})
    notes += [row for row in [*memo.lines("seeds"), door.unread] if row]
    return SampledResponse(door.kind, sampled, greedy, drafted, notes, doubt)


def _answers(memo: Memo) -> int:
    return len(memo.lines("greedy")) + len(memo.lines("sampled"))


def _counted(memo: Memo) -> int | None:
    """Draft tokens by the server's counters, those of earlier runs too; None where it has none,
    or where none were seen and some answers came in a run that was killed."""
    runs = memo.lines("counted")
    drafted = sum(run["drafted"] for run in runs)
    whole = sum(run["answers"] for run in runs) == _answers(memo)
    return drafted if runs and (drafted or whole) else None


async def memo_once(memo: Memo, name: str, value: Any) -> None:
    """Keep what an awaitable gives, unless it is known."""
    if memo.lines(name):
        value.close()
        return
    memo.add(name, await value)


async def _seeds(door: Endpoint, job: SampleJob) -> str:
    """What the server makes of a seed: the same one twice."""
    s = job.sampling
    ask = ServerRequest(min(job.limit, 16), s.temperature, s.top_k, s.top_p, s.min_p, 11)
    prompt = list(job.prompts[0])
    first, second = [await door.answer(prompt, ask) for _ in range(2)]
    return (
        ""
        if first.tokens == second.tokens
        else "one seed gave two answers: it is not taken into account"
    )


async def _greedy(
    door: Endpoint, job: SampleJob, memo: Memo, on_progress: OnProgress
) -> list[SampledAnswer]:
    done = [_answer(row) for row in memo.lines("greedy")]
    ask = ServerRequest(job.limit)
    work = [(level, i) for level in job.levels for i in range(job.greedy)]
    number = len(done)
    while number < len(work):
        level = work[number][0]
        some = [i for at, i in work[number : number + level] if at == level]
        prompts = [list(job.prompts[i % len(job.prompts)]) for i in some]
        replies = await asyncio.gather(*(door.answer(p, ask) for p in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            row = _row(number, number, level, prompt, reply, job)
            memo.add("greedy", row)
            done.append(_answer(row))
            number += 1
        on_progress(number, len(work), "greedy answers")
    return done


async def _sampled(
    door: Endpoint, job: SampleJob, memo: Memo, on_progress: OnProgress
) -> list[SampledAnswer]:
    """Waves of every level in turn until that level has its share of the tokens."""
    kept: dict[int, dict[int, dict[str, Any]]] = {}
    for row in memo.lines("sampled"):
        kept.setdefault(row["wave"], {})[row["number"]] = row
    waves = {w: list(rows.values()) for w, rows in kept.items()}
    whole = {w: rows for w, rows in waves.items() if len(rows) == rows[0]["level"]}
    done = [_answer(row) for w in sorted(whole) for row in whole[w]]
    share = -(-job.tokens // len(job.levels))
    wave = max(whole, default=-1) + 1
    number = max((a.number for a in done), default=-1) + 1
    s = job.sampling
    while True:
        have = dict.fromkeys(job.levels, 0)
        for answer in done:
            have[answer.level] += len(answer.tokens)
        total = sum(min(n, share) for n in have.values())
        on_progress(min(total, job.tokens), job.tokens, "sampled tokens")
        short = [level for level in job.levels if have[level] < share]
        if not short:
            return done
        level = min(short, key=lambda n: have[n])
        prompts = [list(job.prompts[(number + i) % len(job.prompts)]) for i in range(level)]
        asks = [
            ServerRequest(
                job.limit,
                s.temperature,
                s.top_k,
                s.top_p,
                s.min_p,
                (job.seed * 1_000_003 + number + i) % SEEDS,
            )
            for i in range(level)
        ]
        replies = await asyncio.gather(
            *(door.answer(p, a) for p, a in zip(prompts, asks, strict=True))
        )
        rows = [
            _row(number + i, wave, level, prompt, reply, job)
            for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]
        if not any(row["tokens"] for row in rows) and not any(a.tokens for a in done):
            raise UserError(
                f"{job.address.setting}: {door.root}: asked {level} answers; all came back empty; "
                "give other prompts, or look for a limit or stop word of the server's own"
            )
        for row in rows:
            memo.add("sampled", row)
        done += [_answer(row) for row in rows]
        wave, number = wave + 1, number + level


def _row(
    number: int, wave: int, level: int, prompt: list[int], reply: Reply, job: SampleJob
) -> dict[str, Any]:
    """What is kept of one answer. Raises UserError for tokens that cannot be judged."""
    where = f"{job.address.setting}: {job.address.url}"
    if reply.tokens is None:
        raise UserError(
            f"{where}: asked return_token_ids; the answer holds text alone, which more than one "
            f"sequence of tokens can spell; {SERVE}"
        )
    wrong = [t for t in reply.tokens if t >= job.vocab]
    if wrong:
        raise UserError(
            f"{where}: asked {len(prompt)} token ids; came back token {wrong[0]}, and the target "
            f"has {job.vocab}: the server runs another model; set target to that"
        )
    if len(reply.tokens) > job.limit:
        raise UserError(
            f"{where}: asked {job.limit} tokens; {len(reply.tokens)} came back; {SERVE}"
        )
    tokens = list(reply.tokens)
    ended = bool(tokens) and tokens[-1] in job.stops
    if reply.stopped and not ended and len(tokens) < job.limit:
        if len(job.stops) != 1:
            raise UserError(
                f"{where}: asked token ids; the stop token is left out, and the target has "
                f"{len(job.stops)}: which of them came cannot be told; serve with vLLM or SGLang, "
                "which send it"
            )
        tokens += job.stops
    return {
        "number": number,
        "wave": wave,
        "level": level,
        "prompt": prompt,
        "tokens": tokens,
        "drafted": reply.drafted,
        "ignored": list(reply.ignored),
    }


def _answer(row: dict[str, Any]) -> SampledAnswer:
    return SampledAnswer(row["number"], row["wave"], row["level"], row["prompt"], row["tokens"])


def own_distributions(
    plain: Plain,
) -> Callable[[Sequence[SampledAnswer]], Iterator[tuple[int, Tensor]]]:
    """The whole distribution at every place, from the same weights in this process."""

    def distributions(answers: Sequence[SampledAnswer]) -> Iterator[tuple[int, Tensor]]:
        texts = [([*a.prompt, *a.tokens], len(a.prompt)) for a in answers]
        for i, logits in plain.in_batches(texts):
            yield i, logits.detach().cpu().float()

    return distributions


def plain_distributions(
    address: Address, top: int, vocab: int, memo: Memo, on_progress: OnProgress
) -> Callable[[Sequence[SampledAnswer]], Iterator[tuple[int, Tensor]]]:
    """The `top` best of every distribution, from a plain server; what lies beyond has no
    mass. Exact where sampling is among at most `top` tokens."""
    known = {row["key"]: row["laws"] for row in memo.lines("laws")}

    async def ask(texts: Sequence[tuple[list[int], int]]) -> list[Any]:
        async with Endpoint(address) as door:
            return [await door.distributions(ids, start, top) for ids, start in texts]

    def distributions(answers: Sequence[SampledAnswer]) -> Iterator[tuple[int, Tensor]]:
        for i, answer in enumerate(answers):
            text = [*answer.prompt, *answer.tokens]
            key = hashlib.sha256(json.dumps([text, len(answer.prompt)]).encode()).hexdigest()
            if key not in known:
                (found,) = asyncio.run(ask([(text, len(answer.prompt))]))
                known[key] = [[[t, v] for t, v in distribution.items()] for distribution in found]
                memo.add("laws", {"key": key, "laws": known[key]})
                on_progress(len(known), 0, "laws")
            yield i, _rows(known[key], vocab, top)

    return distributions


def _rows(distributions: Sequence[Sequence[Sequence[float]]], vocab: int, top: int) -> Tensor:
    """[R, V] log-probabilities, -inf beyond the `top` best."""
    rows = torch.full((len(distributions), vocab), -torch.inf)
    for row, distribution in zip(rows, distributions, strict=True):
        best = sorted(distribution, key=lambda pair: -pair[1])[:top]
        ids = np.array([int(t) for t, _ in best])
        row[torch.from_numpy(ids)] = torch.tensor([float(v) for _, v in best])
    return rows
