"""The routes, by Starlette: bounded bodies, an API key, answers whole or in pieces, and rows
that are freed when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.conf.errors import UserError
from outrider.scripts.serve_http import answers
from outrider.scripts.serve_http.answers import Completion
from outrider.scripts.serve_http.meters import DraftCounts, Meters
from outrider.scripts.serve_http.requested import ApiRequest, BadRequest, Service, wanted
from outrider.scripts.serve_http.worker import (
    ActiveRequest,
    Ended,
    Event,
    Full,
    RequestFailed,
    Worker,
)

PAGE = Path(__file__).with_name("page.html")
LOOK = 0.25  # seconds between two looks at whether the client is still there
LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]", "::1"]
NOTHING_ELSE = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class Json(JSONResponse):
    """JSON of any text: halves of surrogate pairs, which a request may hold and an error
    repeat, are written as JSON's own escapes."""

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return _bytes(content)


@dataclass(frozen=True)
class Access:
    """Who may come in. key: the API key, "" for none. local: only this machine connects, so
    that pages of other sites must not reach it by a name of theirs."""

    key: str
    local: bool
    most_bytes: int


class OpenRequest:
    """A request that the worker has, seen from the event loop."""

    def __init__(self, worker: Worker, want: ApiRequest):
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

        def tell(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._worker, self.began = worker, time.perf_counter()
        self.job: ActiveRequest = worker.submit(want.ask, tell)

    async def events(self, request: Request) -> AsyncGenerator[Event, None]:
        """What comes, until the answer ends or the client is gone; then its row is free."""
        try:
            while True:
                try:
                    event = await asyncio.wait_for(self._events.get(), LOOK)
                except TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                yield event
                if isinstance(event, Ended | RequestFailed):
                    return
        finally:
            self._worker.cancel(self.job)


class App:
    """The handlers and what they share."""

    def __init__(self, worker: Worker, service: Service, door: Access):
        self.worker, self.service, self.door = worker, service, door
        self.meters = Meters(service.model, lambda: worker.counts)
        self.since = int(time.time())
        self._page = PAGE.read_text(encoding="utf-8")

    def application(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
        ]
        hosts = LOCAL_NAMES if self.door.local else ["*"]
        return Starlette(
            routes=routes,
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers={
                HTTPException: _http_error,
                BadRequest: _refused,
                Full: _full,
                ClientDisconnect: _left,
                Exception: _failed,
            },
        )

    # -- what is not decoded

    async def page(self, request: Request) -> Response:
        """The page, one file."""
        return HTMLResponse(self._page, headers=NOTHING_ELSE)

    async def health(self, request: Request) -> Response:
        """200 while the decoding thread lives."""
        alive = self.worker.is_alive()
        return Json({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        """Counters since the start."""
        return Response(self.meters.page(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The one model, with its drafters."""
        self._admit(request)
        return Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model by its name."""
        self._admit(request)
        name = request.path_params["name"]
        if name != self.service.model:
            said = f"model: {name[:80]} is not served here; the model is {self.service.model}"
            raise BadRequest(said, "model", 404, "model_not_found")
        return Json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.service.model,
            "object": "model",
            "created": self.since,
            "owned_by": "outrider",
            "max_model_len": self.service.longest,
            "drafters": list(self.service.drafters),
        }

    # -- what is

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        return await self._answer(request, chat=True)

    async def completion(self, request: Request) -> Response:
        """/v1/completions."""
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, chat: bool) -> Response:
        self._admit(request)
        raw = await self._body(request)
        want = await asyncio.to_thread(wanted, raw, chat, self.service)
        try:
            requested = OpenRequest(self.worker, want)
        except UserError as error:
            raise BadRequest(str(error), status=503) from None
        answer = Completion(want, self.service.model, self.service.tokenizer)
        if want.stream:
            pieces = self._pieces(request, requested, answer)
            return StreamingResponse(pieces, media_type="text/event-stream")
        async with contextlib.aclosing(requested.events(request)) as events:
            async for event in events:
                if isinstance(event, RequestFailed):
                    raise BadRequest(event.reason, status=500 if event.mine else 400)
                if isinstance(event, Ended):
                    return Json(answer.whole(event, self._count(requested, event)))
                answer.said += event
        raise ClientDisconnect

    async def _pieces(
        self, request: Request, requested: OpenRequest, answer: Completion
    ) -> AsyncIterator[bytes]:
        """Server-sent events."""
        async with contextlib.aclosing(requested.events(request)) as events:
            for opening in answer.opening():
                yield _event(opening)
            async for event in events:
                if await request.is_disconnected():
                    return
                if isinstance(event, RequestFailed):
                    yield _event(answers.error(event.reason, 500 if event.mine else 400))
                elif isinstance(event, Ended):
                    for closing in answer.closing(event, self._count(requested, event)):
                        yield _event(closing)
                    yield b"data: [DONE]\n\n"
                else:
                    yield _event(answer.piece(event))

    def _count(self, requested: OpenRequest, ended: Ended) -> DraftCounts:
        draft = DraftCounts.of(ended.generation.cycles)
        self.meters.count(ended, draft, time.perf_counter() - requested.began)
        return draft

    def _admit(self, request: Request) -> None:
        """Raises Refused without the API key."""
        if not self.door.key:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.door.key.encode())
        if scheme.lower() != "bearer" or not right:
            raise BadRequest("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """At most so many bytes. Raises Refused for more, and for another kind of body: a page
        of another site can send that without asking first."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise BadRequest("content-type: send application/json", status=415)
        most = self.door.most_bytes
        large = BadRequest(f"body: larger than {most} bytes; send less", status=413)
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise large
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise large
        return bytes(raw)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _bytes(value) + b"\n\n"


def _bytes(value: Any) -> bytes:
    # Half of a surrogate pair as a backslash, which is what JSON writes too.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # not request.url: that is made with a Host that may be anything
    said = {404: f"{path[:80]}: no such path", 405: f"{request.method}: not here"}
    message = said.get(error.status_code, str(error.detail))
    return Json(answers.error(message, error.status_code), error.status_code)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return Json(answers.refusal(error), error.status)


async def _full(request: Request, error: Exception) -> Response:
    assert isinstance(error, Full)
    return Json(answers.refusal(error), 429, headers={"Retry-After": str(error.wait)})


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    return Json(answers.error("the server failed; see its log", 500), 500)
