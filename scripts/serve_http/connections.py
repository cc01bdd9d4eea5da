"""Connections that cost each other nothing: one whose client is late is closed, one that waits
for nothing gives way to a newer one, and what strangers send fills no log.

uvicorn has a limit for idle connections alone: half a request stays for ever, before any API key
is asked, and with too many of them nobody else is let in.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import resource
import socket
import time
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SPARE = 256  # connections beside those whose requests run or wait
RESERVED = 128  # files that are no connections, and those that are on their way in or out
AT_ONCE = 16  # taken in before the first of them can give way
WAITING = 1024  # that the system holds until then
OFTEN = 60.0  # seconds in which the same line is logged once
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
UNANSWERED = (h11.IDLE, h11.SEND_RESPONSE)
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

_log = logging.getLogger("uvicorn.error")
_serial = itertools.count()


class Connection(H11Protocol):
    """A connection whose client has `patience` seconds for a whole request, from its first
    byte (the first one: from the beginning), and as long to take what lies ready for it."""

    patience: float
    most: int

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self.number = next(_serial)
        self.dropped = False
        self._clock: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """Of the client, without its port."""
        return self.client[0] if self.client else ""

    @property
    def idle(self) -> bool:
        """Whether nothing is being made for its client: no request, half of one, or one that
        is answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def drop(self) -> None:
        """Close now, whatever the client has not taken yet."""
        self.dropped = True
        self.transport.abort()

    # -- what uvicorn and the transport call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(standing(self.connections)) > self.most:
            give_way(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self.dropped = True
        super().connection_lost(exc)
        self._stop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Nonsense came. Where it is the rest of a request, that one is over, and what its
        handler still says has nowhere to go."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in UNANSWERED:
            super().send_400_response(msg)
        else:
            self.drop()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def shutdown(self) -> None:
        super().shutdown()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    # -- the clock

    def _watch(self) -> None:
        """Let the clock run while the client owes something. What comes in pieces does not
        turn it back."""
        if self.dropped or not self._owes():
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(self.patience, self._late)

    def _owes(self) -> bool:
        """Bytes to send or to take. Between two requests uvicorn's own clock runs."""
        state = self.conn.their_state
        between = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        sends = state is h11.SEND_BODY or (state is h11.IDLE and not between)
        return sends or self.flow.write_paused or self.transport.is_closing()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        self._clock = None
        begun = self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
        if begun and self.conn.our_state in UNANSWERED and not self.transport.is_closing():
            self.transport.write(LATE)
        self.drop()


def standing(connections: set[Any]) -> list[Connection]:
    """Those that are not on their way out."""
    return [one for one in connections if not one.dropped]


def give_way(connections: set[Any]) -> None:
    """Close one idle connection: the oldest of the address that has the most of them, so that
    one client takes its room from itself. Where nobody is idle nobody is closed."""
    idle = [one for one in standing(connections) if one.idle]
    if idle:
        count = Counter(one.address for one in idle)
        most = max(count.values())
        min((one for one in idle if count[one.address] == most), key=lambda one: one.number).drop()


class Seldom(logging.Filter):
    """The same line once in a while: what strangers send must not fill the disk. Tracebacks
    always."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        now = time.monotonic()
        if record.exc_info or now - self._said.get(str(record.msg), -OFTEN) >= OFTEN:
            self._said[str(record.msg)] = now
            return True
        return False


SELDOM = Seldom()


class Server(uvicorn.Server):
    """uvicorn's, which says little of connections that cannot be taken, and makes room for
    them."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(self._trouble)
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(WAITING)

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in FULL:
            _log.error("no file is left for a connection; raise ulimit -n")
            give_way(self.server_state.connections)
        else:
            loop.default_exception_handler(context)


def server(app: Any, busy: int, patience: float, drain: float) -> Server:
    """A server of `app`.

    busy: requests that may run and wait. patience: seconds that a client has for a whole request,
    and to take what lies ready for it. drain: seconds of running answers after SIGTERM.
    """
    kind = type("Bounded", (Connection,), {"patience": patience, "most": _most(busy)})
    settings = uvicorn.Config(
        app,
        http=kind,
        ws="none",
        loop="asyncio",
        backlog=AT_ONCE,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(drain)),
    )
    _log.addFilter(SELDOM)
    return Server(settings)


def _most(busy: int) -> int:
    """Connections at a time: as many as the files of this process allow."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return busy + SPARE if files < 0 else min(busy + SPARE, max(files - RESERVED, files // 2))
