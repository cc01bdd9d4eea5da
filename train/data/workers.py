"""Fresh processes that do a part of long work each. Nothing here loads torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

SECONDS = 5.0  # of work after which further processes are worth their start
S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
_state: Any = None  # of this worker


def processes(requested: int) -> int:
    """How many processes may work; 0 = the cores that this process may use, 32 at most."""
    return requested or min(
        32, len(os.sched_getaffinity(0)) if HAS_AFFINITY else os.cpu_count() or 1
    )


HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def pool(workers: int, state: Any) -> ProcessPoolExecutor:
    """Fresh interpreters, each with `state`: a fork of a process with threads and a GPU may
    hang."""
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(state, os.getpid()),
    )


def call(work: Callable[[Any, T], R], item: T) -> R:
    """In a worker: work(its state, item)."""
    return work(_state, item)


def end(workers: ProcessPoolExecutor) -> None:
    """Stop the workers where they are: what they have not handed over is computed again."""
    running = list((workers._processes or {}).values())
    workers.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.kill()


def ordered(work: Callable[[S, T], R], items: Iterable[T], state: S, workers: int) -> Iterator[R]:
    """work(state, item) of every item, in order: by this process alone for SECONDS, then by so
    many fresh ones beside it. work: a function of a module."""
    begun, others = time.monotonic(), None
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            if others is None and (workers < 2 or time.monotonic() < begun + SECONDS):
                yield work(state, item)
                continue
            others = others or pool(workers, state)
            waiting.append(others.submit(call, work, item))
            while len(waiting) > workers + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        if others is not None:
            end(others)


def _begin(state: Any, parent: int) -> None:
    """In a worker: signals are the parent's to answer, and without a parent there is no work."""
    global _state
    _state = state
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
