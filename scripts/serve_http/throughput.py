"""What the way through `outrider serve` costs: as many requests at a time as it decodes rows,
against `generate` on the same prompts in one batch, taking turns."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from conf.errors import UserError
from decode.engine import Request, generate
from decode.models.load import load_target
from decode.sampling import Sampling
from heads import resolve_drafter
from scripts import serve
from scripts.serve_http.config import ServeConfig

MODEL = "target"
START = 300.0  # seconds that a server has to load its target
Figures = tuple[float, list[list[int]]]  # seconds, token ids of every answer


def throughput(
    cfg: ServeConfig, prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, np.ndarray]:
    """Tokens per second [rounds] of "evaluate" (generate at cfg.batch_size), of "whole" and of
    "streamed" answers, end to end with prompts read; the ways take turns, after a first one that
    does not count. Answers at T = 0 with cfg's first drafter, ended by `tokens` or a stop token.

    prompts: token ids, one for each of cfg.batch_size rows. Raises UserError where the server
    does not start or refuses a request."""
    target = load_target(cfg.target, cfg.dtype, cfg.device)
    drafter = resolve_drafter(cfg.drafters[0], target)
    requests = [Request(ids, tokens, id=number) for number, ids in enumerate(prompts)]

    def evaluate() -> Figures:
        began = time.perf_counter()
        run = generate(target, drafter, requests, Sampling(), batch_size=len(prompts))
        return time.perf_counter() - began, [g.token_ids for g in run.generations]

    with _server(cfg) as url:

        def asked(stream: bool) -> Callable[[], Figures]:
            return lambda: asyncio.run(_ask(url, prompts, tokens, stream))

        ways = {"evaluate": evaluate, "whole": asked(False), "streamed": asked(True)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name in np.roll(list(ways), number):
                seconds, answers = ways[name]()
                if number:
                    rates[name].append(sum(map(len, answers)) / seconds)
    return {name: np.array(values) for name, values in rates.items()}


async def _ask(url: str, prompts: list[list[int]], tokens: int, stream: bool) -> Figures:
    """All prompts at the same time."""

    async def one(web: httpx.AsyncClient, number: int) -> list[int]:
        body = {
            "model": MODEL,
            "prompt": prompts[number],
            "max_tokens": tokens,
            "temperature": 0,
            "seed": number,
            "stream": stream,
            "return_token_ids": True,
        }
        if not stream:
            reply = await web.post("/v1/completions", json=body)
            return list(_choice(reply.json())["token_ids"])
        ids: list[int] = []
        async with web.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():  # of a refusal: its error object alone
                event = line.removeprefix("data: ")
                if event.startswith("{"):
                    ids += _choice(json.loads(event))["token_ids"] or []
        return ids

    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as web:
        await web.get("/health")
        began = time.perf_counter()
        answers = await asyncio.gather(*(one(web, number) for number in range(len(prompts))))
        return time.perf_counter() - began, answers


def _choice(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise UserError(f"serve: {answer['error']['message']}")
    return answer["choices"][0]


@contextmanager
def _server(cfg: ServeConfig) -> Iterator[str]:
    """The URL of a server of its own while the block runs, in a process of its own."""
    with socket.create_server((cfg.host, cfg.port)) as free:
        cfg = replace(cfg, name=MODEL, port=free.getsockname()[1])
    url = f"http://{cfg.host}:{cfg.port}"
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(cfg,), daemon=True)
    process.start()
    try:
        until = time.monotonic() + START
        while not _answers(url):
            if not process.is_alive() or time.monotonic() > until:
                raise UserError("serve: the server did not start; its own message stands above")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.join()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _serve(cfg: ServeConfig) -> None:
    serve.main.__wrapped__(cfg)
