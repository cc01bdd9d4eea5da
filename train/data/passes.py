"""Which rows of a batch go through together, and on which rank: passes with little padding,
and ranks that finish at the same time.

A step's loss is a sum over its rows, divided once, so nothing that is learned depends on
this. What comes out follows from the lengths of the rows alone: every rank finds the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.heads.batch import Batch

# A pass costs beside its positions as much as this share of the largest one's positions: its
# launches, and where the target is sharded the gathering of all of its weights.
LAUNCHES, GATHERING = 1 / 32, 1 / 8
LEAST = 64  # positions that it costs in any case
# Largest passes that are tried, in shares of what a rank has of the batch: smaller ones pad
# less and are spread more evenly, but there are more of them.
TRIED = (1.5, 1.3, 1.15, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.33, 0.25)

Part = list[int]  # of one pass: its rows
Share = list[Part]  # of one rank: its passes


@dataclass(frozen=True)
class Limits:
    """What a pass may hold.

    rows: at most; 0 = any number. tokens: computed positions at most, one row in any case;
    0 = any number. together: the passes of all ranks are collectives, so all have equally
    many."""

    rows: int = 0
    tokens: int = 0
    together: bool = False


def balanced(sizes: Sequence[int], count: int, most: int = 0) -> list[Part]:
    """`count` groups of numbers whose sums are nearly alike: the largest number comes first,
    and goes where the sum is smallest. most: numbers in a group at most; 0 = any number."""
    groups: list[Part] = [[] for _ in range(count)]
    room = [(0, g) for g in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        total, g = heapq.heappop(room)
        groups[g].append(i)
        if len(groups[g]) != most:
            heapq.heappush(room, (total + sizes[i], g))
    return groups


def shared(lengths: Sequence[int], ranks: int, limits: Limits) -> list[Share]:
    """Return the passes of every rank over rows of these lengths, a multiple of `ranks` in
    number; every rank has a pass. With limits.together all have equally many, and the
    largest of each come first."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    rising = [lengths[i] for i in order]
    found = _by_tokens(rising, ranks, limits) if limits.tokens else _by_rows(rising, ranks, limits)
    return [[[order[i] for i in part] for part in share] for share in found]


def _by_rows(rising: list[int], ranks: int, limits: Limits) -> list[Share]:
    """As many rows on each rank, and as many of them at a time as may be."""
    most = len(rising) // ranks
    size = limits.rows or most
    dealt = [sorted(rows) for rows in balanced(rising, ranks, most)]
    return [[rows[i : i + size] for i in range(0, most, size)] for rows in dealt]


def _by_tokens(rising: list[int], ranks: int, limits: Limits) -> list[Share]:
    """Return the best of what comes of several bounds for a pass."""
    price = max(LEAST, int(limits.tokens * (GATHERING if limits.together else LAUNCHES)))
    tried = []
    for most in _bounds(rising, ranks, limits):
        parts = _least_padded(rising, most, price, limits)
        sized = _enough(parts, rising, ranks, limits)
        tried.append((_in_step if limits.together else _spread)(sized, ranks, price))
    return min(tried, key=lambda found: found[0])[1]


def _bounds(rising: list[int], ranks: int, limits: Limits) -> list[int]:
    """Return positions of a pass at most, to be tried."""
    if ranks == 1:
        return [limits.tokens]
    whole = limits.tokens if limits.together else sum(rising) / ranks
    return sorted({min(limits.tokens, int(share * whole)) for share in TRIED}, reverse=True)


def _least_padded(rising: list[int], most: int, price: int, limits: Limits) -> list[Part]:
    """Neighbours in `rising` as passes of at most `most` positions, one row in any case, such
    that the positions of all, and `price` for each, are fewest: a dynamic programme."""
    count = len(rising)
    least, first = [0] * (count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        longest = rising[end - 1]
        least[end], first[end] = least[end - 1] + longest + price, end - 1
        lowest = max(0, end - limits.rows) if limits.rows else 0
        for start in range(end - 2, lowest - 1, -1):
            size = (end - start) * longest
            if size > most:
                break
            if least[start] + size + price <= least[end]:
                least[end], first[end] = least[start] + size + price, start
    found, end = [], count
    while end:
        found.append([*range(first[end], end)])
        end = first[end]
    return found


def _enough(
    parts: list[Part], rising: list[int], ranks: int, limits: Limits
) -> list[tuple[int, Part]]:
    """(positions, rows) of every pass, the largest first, the largest ones halved until all
    ranks have one (with limits.together as many each) and none has more positions than it
    may."""

    def sized(part: Part) -> tuple[int, Part]:
        return -len(part) * max(rising[i] for i in part), part

    found = [sized(part) for part in parts]
    while several := [entry for entry in found if len(entry[1]) > 1]:
        lacking = len(found) % ranks if limits.together else len(found) < ranks
        largest = min(several)
        if not lacking and -largest[0] <= limits.tokens:
            break
        found.remove(largest)
        middle = len(largest[1]) // 2
        found += [sized(largest[1][:middle]), sized(largest[1][middle:])]
    return [(-size, part) for size, part in sorted(found)]


def _spread(
    sized: list[tuple[int, Part]], ranks: int, price: int
) -> tuple[tuple[int, int], list[Share]]:
    """Passes over the ranks: ((positions of the slowest, of all), passes of each)."""
    costs = [size + price for size, _ in sized]
    groups = balanced(costs, ranks)
    slowest = max(sum(costs[i] for i in group) for group in groups)
    return (slowest, sum(costs)), [[sized[i][1] for i in group] for group in groups]


def _in_step(
    sized: list[tuple[int, Part]], ranks: int, price: int
) -> tuple[tuple[int, int], list[Share]]:
    """Return the same where the ranks wait for the largest in every pass: alike ones go
    together."""
    waited = sum(size + price for size, _ in sized[::ranks])
    shares = [[part for _, part in sized[rank::ranks]] for rank in range(ranks)]
    return (waited, sum(size for size, _ in sized)), shares


# Batches, made one pass ahead
# -------------------------------------------------------------------------------------------

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
