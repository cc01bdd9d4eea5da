"""Serve a target with its drafters behind an OpenAI-compatible API, and a page on which one
answer races itself: to look at, not for production.

    outrider serve target=smollm2 drafters=[runs/eagle3@tree,ngram]

/v1/models, /v1/chat/completions, /v1/completions (streamed or not), /health, the page at /. A
request may name a drafter ("drafter": "ngram"; "none" is always there); its answer says under
"speculation" what was drafted and accepted. Requests of one drafter and one sampling setting
join and leave a running batch; other drafters are decoded in turn with it. No paged cache, no
prefix cache, no API key: an engine that loads an export serves users (scripts/export.py).

It listens on this machine alone unless host= says otherwise. SIGTERM stops taking requests,
ends the running answers and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.conf.errors import UserError
from outrider.conf.jsonl import HALF, is_whole, parse_line
from outrider.conf.schema import entry
from outrider.decode.detokenize import Stream
from outrider.decode.engine import BatchLimits, Engine, Fresh, Request, Row, TokenDistribution
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.drafters import refuse_other, resolve_drafter
from outrider.heads.names import NONE
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.serve_http.config import ServeConfig

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request as HttpRequest
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    MISSING = ""
except ImportError as error:
    MISSING = str(error.name)

PAGE = Path(__file__).parent / "serve_http" / "page.html"
QUEUE = 64  # requests that may wait
LOCAL = ["127.0.0.1", "localhost", "::1", "[::1]"]  # this machine, and no site that is led to it


class Body(BaseModel):
    """The keys of a request. An unknown key is refused: it might change the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    drafter: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=1e4)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] = []
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    return_token_ids: bool = False
    logprobs: None = None


class Message(BaseModel):
    """A turn of a conversation. Whatever else it says is for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


class CompletionBody(Body):
    """Of /v1/completions. logprobs: tokens told beside the chosen one, as token_id:7."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=20)  # type: ignore[assignment]
    return_tokens_as_token_ids: Literal[True] = True


def parsed(raw: bytes, schema: type[Body]) -> Any:
    """Return a request's body; null means not given. Raises HTTPException in one line."""
    try:
        given = dict(parse_line(raw))
        return schema.model_validate({k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    except (ValueError, TypeError) as error:
        raise HTTPException(400, f"body: {error}; send one JSON object") from None
    where = ".".join(map(str, first["loc"]))[:60] or "body"
    raise HTTPException(400, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}")


class Piece(NamedTuple):
    """A token, and the text that may be shown with it."""

    token: int
    text: str
    drafted: bool
    distribution: TokenDistribution | None


@dataclass(eq=False)
class Job:
    """A request on its way to its answer. tell: called in the decoding thread with what a pass
    gave; None ends it. gone: the client left. held: text that may not be shown yet; rest: what
    was held at the end. error: (status, why). seconds: that its lane decoded."""

    body: Any
    request: Request
    sampling: Sampling
    drafter: str
    stream: Stream
    head: dict[str, Any]
    tell: Callable[[list[Piece] | None], None]
    pieces: list[Piece] = field(default_factory=list)
    gone: bool = False
    seat: Row | None = None
    held: str = ""
    stopped: bool = False
    finish: str = ""
    rest: str = ""
    error: tuple[Any, ...] = ()
    seconds: float = 0.0

    def hear(self, fresh: Fresh) -> None:
        """Take what a pass gave, up to a stop string."""
        rows: list[Any] = fresh.distributions or [None] * len(fresh.tokens)
        new: list[Piece] = []
        for token, drafted, row in zip(fresh.tokens, fresh.drafted, rows, strict=True):
            if not self.stopped:
                self.held += self.stream.push(token)
                new.append(Piece(token, self._release(), drafted, row))
        self.tell(new)

    def end(self, finish: str, seconds: float) -> None:
        """The answer is whole."""
        if not self.stopped:
            self.held += self.stream.rest()
            self.rest = self._release(whole=True)
        self.seconds = seconds - self.seconds
        self.finish = "stop" if self.stopped or finish == "eos" else "length"
        self.tell(None)

    def fail(self, *why: Any) -> None:
        """There will be no answer: a status and a line."""
        self.error = why
        self.tell(None)

    def _release(self, whole: bool = False) -> str:
        """Return the text before any stop string and, while more may come, before one's
        beginning."""
        stops = [self.body.stop] if isinstance(self.body.stop, str) else self.body.stop
        places = [at for stop in stops if stop and (at := self.held.find(stop)) >= 0]
        self.stopped, end = bool(places), min(places, default=len(self.held))
        if not places and not whole:
            begun = (n for s in stops for n in range(1, len(s)) if self.held.endswith(s[:n]))
            end -= max(begun, default=0)
        out, self.held = self.held[:end], self.held[end:]
        return out

    async def events(self, coming: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, one a token; the last one tells the usage."""
        async with contextlib.aclosing(coming):  # type: ignore[type-var]
            async for piece in coming:
                yield _sent({**self.head, "choices": [self._choice(piece.text, [piece])]})
        if self.error:
            yield _sent(_error(*self.error))
        elif self.finish:
            yield _sent(self.last(self.rest, []))
            yield "data: [DONE]\n\n"

    def last(self, text: str, pieces: list[Piece]) -> dict[str, Any]:
        """Return the end of the answer, with as much of it as was not told yet."""
        asked, told = len(self.request.prompt), len(self.pieces)
        cycles = self.seat.generation.cycles if self.seat else []
        speculation = {
            "drafter": self.drafter,
            "seconds": round(self.seconds, 6),
            "cycles": len(cycles),
            "drafts": sum(cycle.proposed > 0 for cycle in cycles),
            "drafted": sum(cycle.proposed for cycle in cycles),  # levels, not nodes
            "accepted": sum(cycle.accepted for cycle in cycles),
        }
        usage = {"prompt_tokens": asked, "completion_tokens": told}
        usage["total_tokens"] = asked + told
        choice = {**self._choice(text, pieces), "finish_reason": self.finish}
        return {**self.head, "choices": [choice], "usage": usage, "speculation": speculation}

    def _choice(self, text: str, pieces: list[Piece]) -> dict[str, Any]:
        choice: Any = {"index": 0, "finish_reason": None, "logprobs": None, "text": text}
        if isinstance(self.body, ChatBody):
            said = {"role": "assistant", "content": choice.pop("text")}
            choice["delta" if self.body.stream else "message"] = said
        if self.body.logprobs is not None:
            told, name = [p.distribution for p in pieces if p.distribution], "token_id:{}".format
            choice["logprobs"] = {
                "tokens": [name(piece.token) for piece in pieces],
                "token_logprobs": [one.logprob for one in told],
                "top_logprobs": [{name(t): v for t, v in one.top[::-1]} for one in told],
            }
        if self.body.return_token_ids:
            choice["token_ids"] = [piece.token for piece in pieces]
            choice["drafted"] = [piece.drafted for piece in pieces]
            choice["prompt_token_ids"] = None if self.body.stream else [*self.request.prompt]
        return choice


@dataclass
class Lane:
    """The running batch of a drafter: all rows of one sampling setting."""

    sampling: Sampling
    batch: Engine
    jobs: dict[int, Job] = field(default_factory=dict)


class Decoder(threading.Thread):
    """Decode the requests of a queue until it is closed. Every job gets its end."""

    def __init__(self, target: Target, drafters: list[str], room: BatchLimits):
        super().__init__(name="decoding", daemon=True)
        self.target, self.room = target, room
        self.drafters = {name: resolve_drafter(name, target) for name in drafters}
        self.lanes: dict[str, Lane] = {}
        self.waiting: list[Job] = []
        self._turn, self._closing = threading.Condition(), False

    def submit(self, job: Job) -> None:
        """Queue a job. Raises HTTPException where it cannot wait."""
        with self._turn:
            if self._closing or len(self.waiting) >= QUEUE:
                raise HTTPException(503, "the queue is full, or the server ends; ask again")
            self.waiting.append(job)
            self._turn.notify()

    def close(self) -> None:
        """End now; what still runs or waits gets an error."""
        with self._turn:
            self._closing = True
            self._turn.notify()
        self.join()

    def run(self) -> None:
        """Admit what waits, then run one cycle of each drafter's batch."""
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(lambda: self._closing or self.waiting or self.running())
                    if self._closing:
                        return
                    self._seat()
                for name, lane in list(self.lanes.items()):
                    if lane.jobs:
                        self._step(name, lane)
        finally:
            with self._turn:
                self._closing = True
            for job in [*self.waiting, *self.running()]:
                job.fail(503, "the server is ending")

    def running(self) -> list[Job]:
        """Jobs of all lanes."""
        return [job for lane in list(self.lanes.values()) for job in list(lane.jobs.values())]

    def _seat(self) -> None:
        """Let jobs join their lanes, in order. One whose lane is full, or runs another setting,
        waits, and nobody of its drafter overtakes it."""
        kept: list[Job] = []
        for job in self.waiting:
            lane = self.lanes.get(job.drafter)
            if lane is None or (lane.sampling != job.sampling and not lane.jobs):
                drafter = self.drafters[job.drafter]
                given = (job.sampling, self.room)
                batch = Engine(self.target, drafter, *given, cuts=True)
                lane = self.lanes[job.drafter] = Lane(job.sampling, batch)
            fits = lane.sampling == job.sampling and len(lane.jobs) < self.room.rows
            if not fits or any(other.drafter == job.drafter for other in kept):
                kept.append(job)
            elif not job.gone:
                job.seat = lane.batch.join(job.request, job.hear, job.body.logprobs)
                job.seconds = lane.batch.timing.total_s
                lane.jobs[job.seat.number] = job
        self.waiting = kept

    def _step(self, name: str, lane: Lane) -> None:
        """One cycle of a lane. Whatever goes wrong ends its jobs, and no other lane's."""
        for job in lane.jobs.values():
            if (job.gone or job.stopped) and job.seat:
                lane.batch.leave(job.seat)  # its row is free in this cycle
        try:
            ended = lane.batch.step()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            del self.lanes[name]
            for job in lane.jobs.values():
                job.fail(500, f"decoding failed ({type(error).__name__}); see the log")
            return
        for seat in ended:
            lane.jobs.pop(seat.number).end(seat.generation.finish, lane.batch.timing.total_s)


class App:
    """The handlers and what they share. usual: tokens of an answer that has no limit."""

    def __init__(self, decoder: Decoder, model: str, usual: int):
        self.decoder, self.model, self.usual = decoder, model, usual
        self.longest, self.vocab = decoder.room.longest, decoder.target.vocab_size
        self.tokenizer: Any = copy.deepcopy(decoder.target.tokenizer)

    def application(self, hosts: list[str]) -> Starlette:
        """Return the ASGI application. hosts: names that it may be called by."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/completions", self.answer, methods=["POST"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers={HTTPException: _refused},
        )

    async def page(self, _: HttpRequest) -> Response:
        """Return the page, one file."""
        return FileResponse(PAGE)

    async def health(self, _: HttpRequest) -> Response:
        """200 while the decoding thread lives."""
        return JSONResponse({}, 200 if self.decoder.is_alive() else 503)

    async def models(self, _: HttpRequest) -> Response:
        """Return the one model, with its drafters."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "outrider"}
        model |= {"max_model_len": self.longest, "drafters": list(self.decoder.drafters)}
        return JSONResponse({"object": "list", "data": [model]})

    async def answer(self, request: HttpRequest) -> Response:
        """/v1/chat/completions and /v1/completions."""
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "content-type: send application/json")
        schema = ChatBody if "chat" in request.scope["path"] else CompletionBody
        body = parsed(await request.body(), schema)
        loop, told = asyncio.get_running_loop(), asyncio.Queue[list[Piece] | None]()

        def tell(pieces: list[Piece] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, pieces)

        job = self.job(body, tell)
        self.decoder.submit(job)
        coming = _pieces(request, job, told)
        if body.stream:
            return StreamingResponse(job.events(coming), media_type="text/event-stream")
        async for _ in coming:
            pass
        if job.error:
            raise HTTPException(*job.error)
        whole = "".join(piece.text for piece in job.pieces) + job.rest
        return JSONResponse(job.last(whole, job.pieces))

    def job(self, body: Any, tell: Callable[[list[Piece] | None], None]) -> Job:
        """Return a request as a job. Raises HTTPException."""
        if body.model != self.model:
            raise HTTPException(404, f"model: not served here; the model is {self.model}")
        known = list(self.decoder.drafters)
        if body.drafter not in (None, *known):
            raise HTTPException(400, f"drafter: not loaded; choose among {', '.join(known)}")
        top_k = body.top_k if 0 < body.top_k < self.vocab else 0
        sampling = Sampling()  # greedy requests share a batch, whatever else they name
        try:
            ids = self._ids(body)
            if body.temperature:
                sampling = Sampling(body.temperature, top_k, body.top_p, body.min_p)
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        room = self.longest - len(ids)
        limit = body.max_tokens or body.max_completion_tokens
        if room < (limit or 1):
            said = f"{limit or 1} behind {len(ids)} of the prompt exceed {self.longest}; shorten"
            raise HTTPException(400, f"max_tokens: {said}")
        seed = secrets.randbits(63) if body.seed is None else body.seed
        request = Request(ids, limit or min(self.usual, room), id=seed)
        kind = "chat.completion" + ".chunk" * body.stream
        head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": self.model}
        head["object"] = kind if isinstance(body, ChatBody) else "text_completion"
        text = Stream(self.decoder.target.tokenizer)
        return Job(body, request, sampling, body.drafter or known[0], text, head, tell)

    def _ids(self, body: Any) -> list[int]:
        """Return the prompt's token ids. Raises UserError."""
        if isinstance(body, ChatBody):
            return chat_ids(self.tokenizer, [turn.model_dump() for turn in body.messages])
        if isinstance(body.prompt, str) and not is_whole(body.prompt):
            raise UserError(f"prompt: holds {HALF}; remove it")
        text = isinstance(body.prompt, str)
        ids = list(self.tokenizer(body.prompt)["input_ids"] if text else body.prompt)
        if not ids or not all(0 <= token < self.vocab for token in ids):
            raise UserError(f"prompt: give a token or more, of 0..{self.vocab - 1}")
        return ids


async def _pieces(
    request: HttpRequest, job: Job, told: asyncio.Queue[list[Piece] | None]
) -> AsyncIterator[Piece]:
    """Yield what comes, until the answer ends or the client is gone; then its row is free."""
    pieces: list[Piece] | None = []
    try:
        while pieces is not None and not await request.is_disconnected():
            job.pieces += pieces
            for piece in pieces:
                yield piece
            pieces = []
            with contextlib.suppress(TimeoutError):
                pieces = await asyncio.wait_for(told.get(), 0.25)  # seconds
    finally:
        job.gone = pieces is not None


def _sent(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _refused(_: HttpRequest, error: Any) -> Response:
    return JSONResponse(_error(error.status_code, str(error.detail)), error.status_code)


@entry("serve", ServeConfig)
def main(cfg: ServeConfig) -> int:
    """Load, listen, serve until SIGTERM or Ctrl-C."""
    if MISSING:
        raise UserError(f"serve: {MISSING} is not installed; pip install -e '.[serve]'")
    try:
        bound = socket.create_server((cfg.host, cfg.port), backlog=128)
    except OSError as error:
        said = f"{cfg.host}:{cfg.port} cannot be listened on ({error.strerror})"
        raise UserError(f"port: {said}; give another, or port=0 for any free one") from None
    plan = MemoryPlan(cfg.batch_size, cfg.longest, 64)  # nodes of a draft tree
    refuse_other(cfg.drafters, cfg.target)
    target = load_target(cfg.target, cfg.dtype, cfg.device, plan)
    target.pack_weights()  # before anybody waits for it
    room = BatchLimits(cfg.batch_size, min(cfg.longest, target.context_length))
    decoder = Decoder(target, list(dict.fromkeys([*cfg.drafters, NONE])), room)
    model = cfg.name or (target.identity.name if target.identity else "target")
    hosts = LOCAL if cfg.host in LOCAL else ["*"]
    app = App(decoder, model, cfg.max_new_tokens).application(hosts)
    how = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30, lifespan="off")
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is ended
    where = f"http://{cfg.host}:{bound.getsockname()[1]}"
    print(f"{model} with {', '.join(decoder.drafters)}: {where}", flush=True)
    decoder.start()
    try:
        uvicorn.Server(how).run([bound])
    finally:
        decoder.close()
    return 0


if __name__ == "__main__":
    main()
