"""A server of the completions API whose every word is told in advance: what a row of the
scoreboard must bear or refuse.

    with odd(lambda body: vllm([5, 6, 2], stopped=True)) as server: ...
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
ENDLESS = "a page that goes on for as long as it is read"


def vllm(tokens: list[int] | None, stopped: bool = False) -> dict[str, Any]:
    """An answer as vLLM gives it."""
    choice: dict[str, Any] = {"text": "", "finish_reason": "stop" if stopped else "length"}
    return {"choices": [choice if tokens is None else choice | {"token_ids": tokens}]}


def llamacpp(body: dict[str, Any], tokens: list[int], stop: str = "limit", **changed: Any) -> Any:
    """An answer as llama.cpp gives it. taken into account: settings that it took otherwise
    than asked."""
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
    """url; what it was asked, in order; sent: bytes of endless pages."""

    url: str
    requested: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0


@contextlib.contextmanager
def odd(
    answer: Answer, owner: str = "vllm", metrics: Callable[[], str] | None = None
) -> Iterator[Odd]:
    """A server while the block runs. answer: to a request; what it raises becomes status 400.
    metrics: its page (ENDLESS: one without an end), None for no such page."""
    message = Odd("")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Nothing."""

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def _endless(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" " * (1 << 16))
                    message.sent += 1 << 16

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "m", "owned_by": owner}]}))
            elif metrics is not None and (page := metrics()) is ENDLESS:
                self._endless()
            elif metrics is not None:
                self._send(200, page)
            else:
                self._send(404, "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message.requested.append(body)
            try:
                self._send(200, json.dumps(answer(body)))
            except ValueError as error:
                self._send(400, json.dumps({"error": str(error)}))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    message.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield message
    finally:
        server.shutdown()
        server.server_close()
