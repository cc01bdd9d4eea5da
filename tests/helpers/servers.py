"""HTTP servers for tests, each a function of what it is asked.

with answering(lambda path, body: {"data": []}) as url: ...
with odd(lambda body: vllm([5, 6, 2], stopped=True)) as server: ...
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (path, what was posted or None) -> JSON; text or bytes as they are; pieces, for as long as they
# are read; None where nothing is there. A ValueError becomes status 400.
Answer = Callable[[str, Any], Any]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Its address while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            try:
                value, status = answer(self.path, body), 200
            except ValueError as error:
                value, status = {"error": str(error)}, 400
            if isinstance(value, dict | list):
                value = json.dumps(value)
            value = value.encode() if isinstance(value, str) else value
            self.send_response(404 if value is None else status)
            with contextlib.suppress(OSError):  # whoever asked has gone
                if value is None or isinstance(value, bytes):
                    self.send_header("Content-Length", str(len(value or b"")))
                self.end_headers()
                for piece in [value or b""] if not isinstance(value, Iterator) else value:
                    self.wfile.write(piece)
                    self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def models(owner: str) -> dict[str, Any]:
    """/v1/models of a server with one model."""
    return {"data": [{"id": "m", "owned_by": owner}]}


def endless() -> Iterator[bytes]:
    """A page that goes on for as long as it is read."""
    return itertools.repeat(b" " * (1 << 16))


def vllm(tokens: list[int] | None, stopped: bool = False) -> dict[str, Any]:
    """An answer as vLLM gives it."""
    choice: dict[str, Any] = {"text": "", "finish_reason": "stop" if stopped else "length"}
    return {"choices": [choice if tokens is None else choice | {"token_ids": tokens}]}


def llamacpp(body: dict[str, Any], tokens: list[int], stop: str = "limit", **changed: Any) -> Any:
    """An answer as llama.cpp gives it. changed: settings that it took otherwise than asked."""
    said = {key: body[key] for key in ("temperature", "top_k", "top_p", "min_p", "seed")}
    return {
        "tokens": tokens,
        "content": "",
        "timings": {},
        "stop_type": stop,
        "generation_settings": said | changed,
    }


@dataclass
class Odd:
    """url, and what it was asked, in order."""

    url: str
    requested: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def odd(
    answer: Callable[[dict[str, Any]], Any],
    owner: str = "vllm",
    metrics: Callable[[], Any] = lambda: None,
) -> Iterator[Odd]:
    """A server whose every word is told in advance. answer: to a request. metrics: its page."""
    seen = Odd("")

    def told(path: str, body: Any) -> Any:
        if body is None:
            return models(owner) if path == "/v1/models" else metrics()
        seen.requested.append(body)
        return answer(body)

    with answering(told) as seen.url:
        yield seen
