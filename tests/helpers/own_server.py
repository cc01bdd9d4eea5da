"""Our own server on the tiny target, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.decode.target import Target
from outrider.scripts.serve_http import connections
from outrider.scripts.serve_http.app import Access, App
from outrider.scripts.serve_http.requested import Service
from outrider.scripts.serve_http.worker import Worker, WorkerLimits

MODEL = "tiny"


@dataclass
class Running:
    """url: without /v1."""

    url: str
    worker: Worker
    target: Target
    app: App
    listener: connections.Server


@contextlib.contextmanager
def serving(
    target: Target,
    drafters: list[str],
    limits: WorkerLimits | None = None,
    key: str = "",
    most_bytes: int = 1 << 16,
    patience: float = 20.0,
    local: bool = True,
) -> Iterator[Running]:
    """A server while the block runs; no row may be left when it ends."""
    limits = limits or WorkerLimits(4, 256, 3, 32)
    worker = Worker(target, drafters, limits, "traversal")
    tokenizer: Any = copy.deepcopy(target.tokenizer)
    service = Service(MODEL, tuple(drafters), limits.longest, 32, target.vocab_size, tokenizer)
    app = App(worker, service, Access(key, local, most_bytes))
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    server = connections.server(app.application(), limits.rows + limits.queue, patience, 30.0)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    worker.start()
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", worker, target, app, server)
    finally:
        server.should_exit = True
        thread.join(20)
        worker.close()


def quiet(worker: Worker, seconds: float = 60.0) -> bool:
    """Whether nothing runs or waits any more, in so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if worker.counts == (0, 0) and not any(group.batch.busy for group in worker._groups):
            return all(not group.batch.rows for group in worker._groups)
        time.sleep(0.02)
    return False
