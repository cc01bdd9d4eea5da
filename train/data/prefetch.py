"""Batches for a run, made by a thread one pass ahead of the loop.

What a batch is follows from its step and rows alone, so nothing is remembered: a resumed run
makes the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from outrider.heads.batch import Batch

Make = Callable[[int, Sequence[int]], tuple[Batch, Any]]  # step, rows -> batch, target


class Made(NamedTuple):
    """What a pass needs. batch: on the CPU. target: what the head's forward gets as such.
    rows: of the pass. last: no pass of its step follows."""

    batch: Batch
    target: Any
    rows: list[int]
    last: bool


def ahead(
    make: Make, passes: Callable[[int], list[list[int]]], steps: Iterable[int]
) -> Generator[Made, None, None]:
    """Yield every pass of some steps, in order; while one is worked on, the next one is
    made. passes: step -> the rows of each pass. Raises what making a batch raises; close it
    in the end."""

    def made(step: int, rows: list[int], last: bool) -> Made:
        return Made(*make(step, rows), rows, last)

    with ThreadPoolExecutor(1, "feed") as pool:
        coming: Future[Made] | None = None
        for k in steps:
            parts = passes(k)
            for left, rows in enumerate(parts, 1 - len(parts)):
                due, coming = coming, pool.submit(made, k, rows, left == 0)
                if due is not None:
                    yield due.result()
        if coming is not None:
            yield coming.result()
