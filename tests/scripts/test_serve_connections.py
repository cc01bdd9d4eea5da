"""Connections of `outrider serve`: whoever is late is closed, whoever waits for nothing gives way,
and no stranger slows an honest answer, takes its place, or fills the log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
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
from outrider.scripts.serve_http import connections
from tests.helpers.own_server import MODEL, Running, quiet, serving

KEY = "secret"
PATIENCE = 0.4
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RIGHT = HEAD + f"Authorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(kind="tiny", context=512), "float32", "cpu")


@pytest.fixture
def impatient(target: Target) -> Iterator[Running]:
    with serving(target, ["none"], key=KEY, patience=PATIENCE, local=False) as server:
        yield server


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the server and its loop log."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for one in loggers:
        one.addHandler(handler)
    yield found
    for one in loggers:
        one.removeHandler(handler)


def place(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def connected(server: Running, said: str) -> socket.socket:
    one = socket.create_connection(place(server.url), timeout=30)
    one.sendall(said.encode())
    return one


def rest(one: socket.socket) -> bytes:
    """All that comes until the server closes."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(65536):
            got += part
    return got


# -- whoever is late


@pytest.mark.parametrize(
    "said, notices",
    [
        ("", b""),
        ("GET /heal", b"408"),
        (HEAD, b"408"),
        (RIGHT + "Content-Length: 100\r\n\r\n{", b"408"),
        (RIGHT + "Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"408"),
        (HEAD + "Content-Length: 100\r\n\r\n{", b"401"),
        ("GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /heal", b"200"),
    ],
)
def test_half_a_request_is_closed(impatient: Running, said: str, notices: bytes) -> None:
    with connected(impatient, said) as one:
        got = rest(one)
    assert got[9:12] == notices, got
    assert quiet(impatient.worker)


def test_bytes_that_trickle_do_not_turn_the_clock_back(impatient: Running) -> None:
    with connected(impatient, HEAD) as one:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < begin + 30:
                one.sendall(b"X-Name: x\r\n")
                time.sleep(0.05)
        assert time.monotonic() < begin + 20


def test_a_slow_answer_is_not_late(impatient: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = impatient.worker._step
    monkeypatch.setattr(impatient.worker, "_step", lambda group: time.sleep(0.05) or step(group))
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 20, "temperature": 0}
    head = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=impatient.url, headers=head, timeout=60) as web:
        for _ in range(2):  # the second one comes over the same connection
            reply = web.post("/v1/completions", json=body)
            assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] > 10


def test_a_client_that_takes_nothing_is_closed(impatient: Running) -> None:
    """With little room on the way, the answer stays with us; its row is free and so is its
    connection."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": "abc",
            "temperature": 0,
            "max_tokens": 240,
            "logprobs": 20,
            "stream": True,
        }
    )
    impatient.listener.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as mute:
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        mute.connect(place(impatient.url))
        head = f"{RIGHT}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        mute.sendall((head + body).encode())
        assert quiet(impatient.worker)
        end = time.monotonic() + 30
        while impatient.listener.server_state.connections and time.monotonic() < end:
            time.sleep(0.02)
        assert not impatient.listener.server_state.connections


@pytest.mark.parametrize(
    "key, notices", [("", b"401"), (f"Authorization: Bearer {KEY}\r\n", b"400")]
)
def test_nonsense_in_a_body_is_no_traceback(
    impatient: Running, logged: list[logging.LogRecord], key: str, notices: bytes
) -> None:
    """Whether it comes before the answer or behind it."""
    head = f"{HEAD}{key}Transfer-Encoding: chunked\r\n\r\n"
    for parts in ([head, "1\r\n{\r\n", "no chunk\r\n\r\n"], [head + "no chunk\r\n\r\n"]):
        with connected(impatient, parts[0]) as one, contextlib.suppress(OSError):
            for part in parts[1:]:
                time.sleep(0.1)
                one.sendall(part.encode())
            got = rest(one)
            assert got[9:12] in (notices, b"400"), got
    assert not [record for record in logged if record.exc_info]


# -- too many


def test_the_oldest_that_waits_for_nothing_gives_way(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SPARE", 8)
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "stream": True, "temperature": 0}
    with serving(target, ["none"], key=KEY) as server:
        head = {"authorization": f"Bearer {KEY}"}
        kept = []
        with httpx.Client(base_url=server.url, headers=head, timeout=60) as web:
            with web.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                for _ in range(100):
                    kept.append(connected(server, HEAD))
                assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
                assert len(server.listener.server_state.connections) <= 4 + 32 + 8 + 2
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert rest(kept[0]) == b"", "the oldest was closed"
        for one in kept:
            one.close()


class Messages:
    """As much of a connection as its turn needs."""

    def __init__(self, number: int, address: str, idle: bool = True):
        self.number, self.address, self.idle, self.dropped = number, address, idle, False

    def drop(self) -> None:
        self.dropped = True


def test_an_address_takes_its_room_from_itself() -> None:
    crowd = {Messages(number, "10.0.0.1") for number in range(5, 9)}
    others = {Messages(1, "10.0.0.2"), Messages(2, "10.0.0.3"), Messages(3, "10.0.0.1", idle=False)}
    for _ in range(3):
        connections.give_way(crowd | others)
    assert sorted(one.number for one in crowd if one.dropped) == [5, 6, 7]
    assert not any(one.dropped for one in others)


def test_no_file_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and room is made; other errors of the loop are told as ever."""
    server = connections.server(None, 8, 1.0, 1.0)
    crowd = {Messages(number, "x") for number in range(4)}
    server.server_state.connections = crowd  # type: ignore[assignment]
    notices: list[str] = []
    loop = asyncio.new_event_loop()
    loop.default_exception_handler = lambda context: notices.append(context["message"])  # type: ignore[method-assign]
    try:
        connections.SELDOM._said.clear()
        for _ in range(3):
            server._trouble(loop, {"message": "x", "exception": OSError(errno.EMFILE, "Too many")})
        server._trouble(loop, {"message": "other", "exception": ValueError("x")})
    finally:
        loop.close()
    assert capsys.readouterr().err.count("ulimit -n") == 1 and notices == ["other"]
    assert sum(one.dropped for one in crowd) == 3


def test_connections_fit_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((20_000, 328), (1024, 328), (256, 128), (64, 32), (-1, 328)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, n=files: (n, n))
        assert connections._most(72) == most


def test_the_same_line_is_logged_once() -> None:
    seldom = connections.Seldom()

    def made(message: str, exc_info: Any = None) -> logging.LogRecord:
        return logging.LogRecord("x", logging.WARNING, "", 0, message, (), exc_info)

    assert [seldom.filter(made(text)) for text in "aabab"] == [True, False, True, False, False]
    assert seldom.filter(made("a", (ValueError, ValueError(), None)))


# -- a thousand of them

HONEST = 8
TOKENS = 950
HOSTILE = 1000
HALVES = 300
FILES = 256


@contextlib.contextmanager
def own_process(folder: Path) -> Iterator[tuple[str, psutil.Process, Path]]:
    """A server of its own, with few files; what it writes to stderr is kept."""
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "target=tiny", "port=0"]
    command += ["dtype=float32", "drafters=[ngram]", "target.context=1024", "device=cpu"]
    errors = folder / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OUTRIDER_API_KEY": KEY},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found, errors.read_text()
        yield found[0], psutil.Process(process.pid), errors
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def hostile(number: int) -> bytes:
    """What a stranger sends, some of them with the key."""
    bodies = [
        b"{",
        b"[" * 5000,
        b'{"model": "m", "\\ud800": 1}',
        b'{"model": "NAME", "prompt": "a", "n": true}',
        b'{"model": "NAME", "prompt": [1, 99999]}',
        b'{"model": "NAME", "prompt": "a", "top_k": 1e400}',
        b'{"model": "NAME", "prompt": "a", "stop": ["' + b"a" * 2000 + b'"]}',
        b'{"model": "NAME", "prompt": "' + b"x" * 50_000 + b'"}',
        os.urandom(2000),
    ]
    body = bodies[number % len(bodies)]
    size = f"Content-Length: {len(body)}\r\n\r\n".encode()
    kinds = [
        RIGHT.encode() + size + body,
        HEAD.encode() + size + body,
        os.urandom(300) + b"\r\n\r\n",
        RIGHT.encode() + size + body[: len(body) // 2],
        RIGHT.encode() + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nno chunk\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20,
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
        RIGHT.encode() + b"Content-Length: 99999999\r\n\r\n" + b"{" * 100_000,
        b"",
    ]
    return kinds[number % len(kinds)].replace(b"NAME", b"tiny-llama-2x64")


async def attack(address: tuple[str, int], number: int, turn: asyncio.Semaphore) -> None:
    """One connection: some are reset, some stay for a while and take nothing."""
    async with turn:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                _, writer = await asyncio.open_connection(*address)
                writer.write(hostile(number))
                await writer.drain()
                if number % 3 == 0:
                    reset = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, reset
                    )
                if number % 7 == 0:
                    await asyncio.sleep(0.5)
                writer.close()


@contextlib.asynccontextmanager
async def halves(address: tuple[str, int]) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Half heads that stay."""
    kept: list[asyncio.StreamWriter] = []

    async def one() -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.write(RIGHT.encode())
        kept.append(writer)

    await asyncio.gather(*(one() for _ in range(HALVES)))
    try:
        yield kept
    finally:
        for writer in kept:
            writer.close()


async def honest(url: str, ids: list[int], begun: asyncio.Semaphore) -> tuple[list[int], str]:
    """A stream's token ids and how it ended."""
    body = {"model": "tiny-llama-2x64", "prompt": ids, "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "return_token_ids": True, "drafter": "none"}
    got: list[int] = []
    head = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=head, timeout=300) as web:
        async with web.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            begun.release()
            last = ""
            async for line in reply.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    got += event["choices"][0]["token_ids"]
    return got, last


async def siege(url: str, prompts: list[list[int]]) -> tuple[list[Any], int]:
    """The honest answers, and how many of the hostile were there before the first one ended."""
    address = place(url)
    begun, turn = asyncio.Semaphore(0), asyncio.Semaphore(100)
    streams = [asyncio.create_task(honest(url, ids, begun)) for ids in prompts]
    for _ in streams:
        await begun.acquire()
    meanwhile = 0

    async def one(number: int) -> None:
        nonlocal meanwhile
        await attack(address, number, turn)
        meanwhile += not any(stream.done() for stream in streams)

    async with halves(address), httpx.AsyncClient(base_url=url, timeout=30) as web:
        for first in range(0, HOSTILE, 250):
            await asyncio.gather(*(one(number) for number in range(first, first + 250)))
            assert (await web.get("/health")).status_code == 200
    return await asyncio.gather(*streams), meanwhile


@pytest.mark.slow
def test_eight_streams_under_a_thousand_hostile_connections(tmp_path: Path) -> None:
    """Four times, so that memory can be compared with what it was when all was warm."""
    target = load_target(TargetConfig(kind="tiny", context=1024), "float32", "cpu")
    requests = [Request([3 + n, 4, 5, 6, 7 + n, 4, 5], TOKENS) for n in range(5 * HONEST)]
    found = generate(target, NoDraft(), requests, Sampling(), batch_size=2 * HONEST).generations
    right = [one for one in found if len(one.token_ids) == TOKENS][:HONEST]
    assert len(right) == HONEST, "answers that last"
    prompts = [one.prompt_ids for one in right]
    with own_process(tmp_path) as (url, process, errors):
        memory = []
        for _ in range(4):
            answers, meanwhile = asyncio.run(siege(url, prompts))
            memory.append(process.memory_info().rss)
            for (got, last), one in zip(answers, right, strict=True):
                assert got == one.token_ids and last == "data: [DONE]"
            assert meanwhile >= HOSTILE // 2, "the streams outlasted half of the siege at least"
        assert process.num_fds() < FILES
    assert memory[3] < 1.05 * memory[1], [m >> 20 for m in memory]
    said = errors.read_text()
    assert "Traceback" not in said and len(said) < 4000, said[:4000]
