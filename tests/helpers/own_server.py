"""Our own server on the tiny target, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from outrider.decode.engine import BatchLimits
from outrider.decode.target import Target
from outrider.scripts.serve import App, Decoder

MODEL = "tiny"


@dataclass
class Running:
    """url: without /v1."""

    url: str
    decoder: Decoder

    def quiet(self, seconds: float = 60.0) -> bool:
        """Whether nothing runs or waits any more, in so many seconds."""
        end = time.monotonic() + seconds
        while self.decoder.waiting or self.decoder.running():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


@contextlib.contextmanager
def serving(
    target: Target, drafters: list[str], rows: int = 4, longest: int = 256
) -> Iterator[Running]:
    """A server while the block runs."""
    decoder = Decoder(target, drafters, BatchLimits(rows, longest))
    app = App(decoder, MODEL, 32).application(["127.0.0.1"])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    decoder.start()
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", decoder)
    finally:
        server.should_exit = True
        thread.join(20)
        decoder.close()
