"""`outrider serve` under a crowd, under a signal, and under the certificate: slow."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.files import ROOT
from outrider.scripts.serve_http.worker import WorkerLimits
from tests.helpers.own_server import MODEL, Running, quiet, serving

REQUESTS, CANCELLED, AT_A_TIME = 1000, 0.3, 24


def target_of() -> Target:
    return load_target(TargetConfig(kind="tiny", context=256), "float32", "cpu")


async def crowd(url: str, bodies: list[dict[str, Any]], leave: list[int]) -> list[Any]:
    """Every answer's token ids; None where the client left after so many events."""
    turn = asyncio.Semaphore(AT_A_TIME)

    async def one(web: httpx.AsyncClient, body: dict[str, Any], after: int) -> list[int] | None:
        async with turn:
            if not body["stream"]:
                reply = await web.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                return list(reply.json()["choices"][0]["token_ids"])
            ids: list[int] = []
            async with web.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.status_code == 200
                seen = 0
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    seen += 1
                    if seen > after:
                        return None
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    ids += event["choices"][0]["token_ids"]
            return ids

    async with httpx.AsyncClient(base_url=url, timeout=300) as web:
        return list(
            await asyncio.gather(*(one(web, b, n) for b, n in zip(bodies, leave, strict=True)))
        )


@pytest.mark.slow
def test_a_thousand_requests_of_which_a_third_leaves() -> None:
    target = target_of()
    draw = random.Random(5)
    bodies, leave = [], []
    for number in range(REQUESTS):
        cancelled = draw.random() < CANCELLED
        temperature = draw.choice([0.0, 0.0, 0.0, 0.7, 1.0])
        bodies.append(
            {
                "model": MODEL,
                "prompt": [draw.randrange(3, 300) for _ in range(draw.randrange(1, 60))],
                "max_tokens": draw.randrange(1, 40) + 40 * cancelled,
                "temperature": temperature,
                "seed": number,
                "drafter": draw.choice(["ngram", "none"]),
                "stream": cancelled or draw.random() < 0.5,
                "return_token_ids": True,
            }
        )
        leave.append(draw.randrange(1, 6) if cancelled else 10**6)
    process, memory, answers = psutil.Process(), [], []
    with serving(target, ["ngram", "none"], WorkerLimits(8, 160, 4, 64)) as server:
        for first in range(0, REQUESTS, 250):
            part = slice(first, first + 250)
            answers += asyncio.run(crowd(server.url, bodies[part], leave[part]))
            assert quiet(server.worker), "a row was left behind"
            gc.collect()
            memory.append(process.memory_info().rss)
        assert not any(group.batch._seats for group in server.worker._groups)
    gone = sum(answer is None for answer in answers)
    assert gone > 0.2 * REQUESTS, "clients left in the midst of their answers"
    compared = 0
    for body, answer in zip(bodies, answers, strict=True):
        if answer is None or (body["temperature"] and body["seed"] % 5):
            continue
        request = Request(body["prompt"], body["max_tokens"], id=body["seed"])
        sampling = Sampling(body["temperature"])
        if body["temperature"] and body["drafter"] != "none":
            continue  # the draft takes part in the draws
        alone = generate(target, NoDraft(), [request], sampling).generations[0]
        assert answer == alone.token_ids, body
        compared += 1
    assert compared > 300
    assert memory[3] < 1.05 * memory[1], [m >> 20 for m in memory]


@pytest.mark.slow
def test_sigterm_ends_running_answers_and_exits_with_0(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "target=tiny", "port=0"]
    command += ["dtype=float32", "drafters=[ngram]", "target.context=1024"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found
        url, model = found[0], httpx.get(f"{found[0]}/v1/models").json()["data"][0]["id"]
        replies: list[httpx.Response] = []
        body = {"model": model, "prompt": "abc", "max_tokens": 900, "temperature": 1, "seed": 1}
        asking = threading.Thread(
            target=lambda: replies.append(
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            )
        )
        asking.start()
        while "num_requests_running" not in httpx.get(f"{url}/metrics").text:
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert process.wait(60) == 0
        assert replies[0].status_code == 200 and replies[0].json()["usage"]["completion_tokens"] > 5
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()


def test_answers_are_handed_out_while_others_are_decoded() -> None:
    """Two settings take turns: the short answer does not wait for the long one."""
    order: list[str] = []

    def ask(server: Running, name: str, **keys: Any) -> threading.Thread:
        def run() -> None:
            body = {"model": MODEL, "prompt": "abc", "seed": 1, **keys}
            assert (
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
            )
            order.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with serving(target_of(), ["none", "ngram"]) as server:
        long = ask(server, "long", max_tokens=200, temperature=1.0)
        while server.worker.counts[0] == 0:
            time.sleep(0.005)
        short = ask(server, "short", max_tokens=3, temperature=0, drafter="ngram")
        for thread in (long, short):
            thread.join(60)
    assert order == ["short", "long"]
