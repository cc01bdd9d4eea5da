"""Functions of tensors captured as CUDA graphs.

A GPU waits for Python where a pass is many short operations: a pass of a small model then takes
several times as long as its weights take to be read. A graph is launched as a whole. It reads and
writes the same places each time, so what it is given is copied into tensors of its own, padded to
their sizes, and what it found is copied out.

A function's first use goes the plain way, for most sizes are met once. The second captures it. The
first CHECKED uses of a graph are compared with the plain way. Where one fails or finds something
else, everything goes the plain way from then on, and a line says so.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import first_line
from outrider.decode import devices
from outrider.decode.cache import TreeCache
from outrider.decode.probe import TOLERANCE, difference
from outrider.decode.scorer import Scorer, Tokens
from outrider.decode.states import Scored, Taps

KEPT = 16  # functions that are remembered, those used last
CHECKED = 2
SHORTEST = 512  # slots of the smallest form of a pass
Found = tuple[Tensor | None, ...]  # each [B, T, ..]
Way = Callable[..., Found]


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether passes in `dtype` on `device` can be captured and are worth it."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


Place = tuple[Any, Any]  # the stream and the memory pool of a model's graphs


def captured(
    way: Way, held: Sequence[Tensor], place: Place | None
) -> tuple[Callable[[], None], Found, Place]:
    """Return what runs `way` again over what is held, where it then leaves what it found, and the
    place for the next one. Raises RuntimeError for a function that asks the device for a value."""
    graph, device = torch.cuda.CUDAGraph(), held[0].device
    side, pool = place or (torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # left again also where the capture's end fails
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:  # libraries set themselves up, and a question to the device shows before the capture
            for _ in range(2):
                way(*held)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            found = way(*held)
    return graph.replay, found, (side, pool)


@dataclass
class Graph:
    """held: what it reads. found: where it leaves what it found. checks: uses that are yet to be
    compared."""

    held: list[Tensor]
    replay: Callable[[], None]
    found: Found
    checks: int = CHECKED

    def __call__(self, given: Sequence[Tensor], rows: int, new: int) -> Found:
        fill(self.held, given)
        self.replay()
        return tuple(None if t is None else t[:rows, :new].clone() for t in self.found)


def fill(held: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors into those of the same or larger sizes, zeros behind them."""
    for to, one in zip(held, given, strict=True):
        if to.shape != one.shape:
            to.zero_()
        to[tuple(map(slice, one.shape))].copy_(one)


class Graphs:
    """The graphs of one model. refused: nothing is captured any more. cache: the keys and values of
    the model's own passes, kept from one request to the next; lent: whether somebody uses it."""

    def __init__(self) -> None:
        self.refused = False
        self.clear()

    def clear(self) -> None:
        """Forget all graphs and the cache, and with them their memory."""
        self._known: OrderedDict[Hashable, Graph | None] = OrderedDict()
        self._place: Place | None = None
        self.cache: TreeCache | None = None
        self.lent = False

    def keep(self, cache: TreeCache) -> None:
        """Capture the passes over `cache` from now on."""
        self.clear()
        self.cache, self.lent = cache, True

    def lend(self, max_rows: int, max_len: int, max_nodes: int) -> TreeCache | None:
        """Return the cache that is kept, empty, where nobody uses it and it has so much room. Else
        forget it, for there may not be room for the next one beside it."""
        cache = self.cache
        if (
            cache is None
            or self.lent
            or cache.max_rows < max_rows
            or cache.max_nodes < max_nodes
            or cache.slots < max_len + cache.max_nodes + 1  # a pass is padded to all its nodes
        ):
            self.clear()
            return None
        cache.lengths, cache.finite, self.lent = [], False, True
        for buffer in cache.buffers:
            buffer.zero_()  # a hidden slot's weight is 0, and 0 * NaN is NaN
        return cache

    def release(self, cache: TreeCache) -> None:
        """Take the cache back from who uses it no more."""
        self.lent &= cache is not self.cache

    def run(
        self,
        owner: Hashable,
        given: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        way: Way,
        plain: Callable[[], Found],
    ) -> Found:
        """Return what `plain` finds, by the graph of `way` where there is one.

        owner: that and `sizes` tell one function from another; it lives as long as its graph.
        given: the function's arguments, the first [B, T, ..]; sizes: to which they are padded with
        zeros. Of what `way` finds the first B rows and T columns are taken. Running both must leave
        what running one of them does."""
        key = owner, *map(tuple, sizes)
        if self.refused or key not in self._known:
            self._known[key] = None
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            return plain()
        self._known.move_to_end(key)
        rows, new = given[0].shape[:2]
        try:
            graph = self._known[key] or self._capture(given, sizes, way)
            found = graph(given, rows, new)
        except Exception as error:
            self._refuse(first_line(error))
            return plain()
        self._known[key] = graph
        if graph.checks:
            graph.checks -= 1
            wanted = plain()
            if any(apart(f, w) for f, w in zip(found, wanted, strict=True)):
                self._refuse("it finds something else")
                return wanted
        return found

    def _capture(self, given: Sequence[Tensor], sizes: Sequence[Sequence[int]], way: Way) -> Graph:
        with torch.inference_mode(False), torch.no_grad():  # may be written to in any mode
            held = [one.new_empty(size) for one, size in zip(given, sizes, strict=True)]
            fill(held, given)  # the capture runs `way` a few times, and it writes where these say
            replay, found, self._place = captured(way, held, self._place)
        return Graph(held, replay, found)

    def _refuse(self, why: str) -> None:
        self.clear()
        self.refused = True
        print(f"target.graph: passes are not captured as CUDA graphs ({why})", file=sys.stderr)


def apart(found: Tensor | None, wanted: Tensor | None) -> bool:
    """Return whether one is not the other within what the dtype may. NaN and infinity where the
    plain way has them are no difference: a drafter's, or of tokens that a model never gives."""
    if found is None or wanted is None:
        return found is not wanted
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return True
    found, wanted = found.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0)
    return difference(found, wanted) > TOLERANCE[wanted.dtype]


def fixed_pass(
    graphs: Graphs,
    scorer: Scorer,
    cache: TreeCache,
    tokens: Tokens,
    taps: Taps,
    plain: Callable[[], Scored],
) -> Scored:
    """Return what `plain` finds, a pass of `scorer`, by a pass of which there are few: rows, tokens
    and slots are padded to a few sizes, and where a row ends and which slots a token may look at
    are numbers on the device."""
    (rows, new), behind, device = tokens.ids.shape, tokens.depth.shape[1], scorer.device
    first, room, longest = behind - new, cache.max_nodes + 1, max(cache.lengths)
    size = fixed_size(longest + room, SHORTEST, cache.slots)

    def way(ids: Tensor, ends: Tensor, seen: Tensor, depth: Tensor, begin: Tensor) -> Found:
        """ids: [B, T]. ends: [B, 1], committed tokens of each row. seen: [B, T, R] bool and depth:
        [B, R], as of Tokens. begin: [1], the first of `ids` among the R."""
        line = torch.arange(room, device=ids.device)
        places, own = ends.max() + line, line[: ids.shape[1]] + begin
        query = ends + depth[:, own]
        mask = scorer.masks.build(ends, places, seen, depth, query, size)
        cache.hold(len(ids), size, places[own])
        return scorer.forward(ids, query, mask, cache, taps)

    ends = devices.send(cache.lengths, device)[:, None]
    seen = tokens.seen
    if seen is None:
        seen = torch.ones(1, new, behind, dtype=torch.bool, device=device)
    begin = torch.full((1,), first, device=device)
    given = tokens.ids, ends, *(t.expand(rows, *t.shape[1:]) for t in (seen, tokens.depth)), begin
    most, some = fixed_size(rows, 1, cache.max_rows), fixed_size(new, 1, room - first)
    sizes = (most, some), (most, 1), (most, some, room), (most, room), (1,)
    found = graphs.run((cache, size, taps), given, sizes, way, plain)
    cache.offset = longest + first
    return found  # type: ignore[return-value]


def fixed_size(number: int, least: int, most: int) -> int:
    """Return the next power of two, or three quarters of one, that is no less than `number`, and no
    less than `least`; at most `most`."""
    whole = max(least, 1 << (number - 1).bit_length())
    short = whole * 3 // 4
    return min(short if least <= short and number <= short else whole, most)
