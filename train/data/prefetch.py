"""Batches for a run, made by a thread one pass ahead of the loop.

What a batch is follows from its step and rows alone, so nothing is remembered: a resumed run
makes the same ones, and a pass that is asked for out of turn is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from outrider.heads.batch import Batch

Make = Callable[[int, Sequence[int]], tuple[Batch, Any]]  # step, rows -> batch, target


class Made(NamedTuple):
    """What a pass needs. batch: on the CPU. target: what the head's forward gets as such. rows:
    of the pass. last: no pass of its step follows."""

    batch: Batch
    target: Any
    rows: list[int]
    last: bool


class Feed:
    """Makes what passes need. `take` gives the passes of a step; while one is worked on, the
    next one is made, also the first of the next step."""

    def __init__(self, make: Make, passes: Callable[[int], list[list[int]]], steps: int) -> None:
        """passes: step -> the rows of each pass. steps: of the run; nothing is made beyond."""
        self._make, self._passes, self._steps = make, passes, steps
        self._pool = ThreadPoolExecutor(1, "feed")
        self._plan: tuple[int, list[list[int]]] = (-1, [])
        self._next: tuple[tuple[int, int], Future[Made]] | None = None

    def take(self, step: int) -> Iterator[Made]:
        """Every pass of a step in turn. Raises what making a batch raises."""
        i, last = 0, False
        while not last:
            known, self._next = self._next, None
            if known is None or known[0] != (step, i):
                made = self._made(step, i)
            else:
                made = known[1].result()
            last, i = made.last, i + 1
            spot = (step + 1, 0) if last else (step, i)
            if spot[0] < self._steps:
                self._next = spot, self._pool.submit(self._made, *spot)
            yield made

    def close(self) -> None:
        """End the thread, once it has made what it is at."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _made(self, step: int, i: int) -> Made:
        known, plan = self._plan  # at once: the other thread may exchange it meanwhile
        if known != step:
            plan = self._passes(step)
            self._plan = step, plan
        return Made(*self._make(step, plan[i]), plan[i], i + 1 == len(plan))
