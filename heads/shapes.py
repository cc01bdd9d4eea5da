"""Static draft trees from measured acceptance: which ranks of which head deserve a node.

The value of a node is the chance that its whole path is right; the expected accepted length of
a tree is one plus the sum of its values, so growing best-first by value is optimal for every
number of nodes (OPT-Tree; Medusa's search does it with a product over heads). Values come from
whole-path hits, smoothed by the product where hits are few.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval, MaxLen, MinLen
from torch import Tensor

from outrider.conf.typed import from_json
from outrider.decode.tree import TreeShape
from outrider.heads.config import MOST_DEPTH, MOST_NODES, MOST_WIDTH, Size

RANKS = 10  # ranks 0..9 are candidates; RANKS itself marks a miss
NODES = 64  # nodes of the stored tree; smaller trees are its first nodes
SMOOTHING = 20.0  # how many measured positions the independence estimate is worth
# Acceptance of Vicuna-7B's heads as published (Cai et al. 2024): top-1 and top-5; what an
# uncalibrated head assumes.
PUBLISHED = ((0.560, 0.780), (0.316, 0.562), (0.201, 0.417), (0.147, 0.340), (0.118, 0.300))

Path = tuple[int, ...]
Rate = Annotated[float, Interval(ge=0, le=1)]


def grow(
    value: Callable[[Path], float], nodes: int, depth: int, ranks: int = RANKS
) -> list[tuple[Path, float]]:
    """Grow best-first: up to `nodes` paths with their values; any prefix of the list is
    itself a whole tree.

    A path enters the frontier after its parent and its elder sibling."""
    frontier: list[tuple[float, Path]] = [(-value((0,)), (0,))] if depth else []
    grown: list[tuple[Path, float]] = []
    while frontier and len(grown) < nodes:
        negative, path = heapq.heappop(frontier)
        grown.append((path, -negative))
        sibling, child = (*path[:-1], path[-1] + 1), (*path, 0)
        if sibling[-1] < ranks:
            heapq.heappush(frontier, (-value(sibling), sibling))
        if len(child) <= depth:
            heapq.heappush(frontier, (-value(child), child))
    return grown


def measure(ranks: Tensor) -> dict[str, Any]:
    """Measure the calibration of a head. ranks: [A, K] int64, rank of the right token at A
    positions, RANKS for a miss.

    Returns JSON: positions, acceptance a[k][rank], and paths with values in best-first order.
    """
    total, heads = ranks.shape
    acceptance = [
        [float((ranks[:, k] == r).sum()) / total for r in range(RANKS)] for k in range(heads)
    ]
    hits: Counter[Path] = Counter()
    for row, count in zip(
        *(t.tolist() for t in ranks.unique(dim=0, return_counts=True)), strict=True
    ):
        for depth in range(heads):
            if row[depth] == RANKS:
                break
            hits[tuple(row[: depth + 1])] += count

    def value(path: Path) -> float:
        independent = 1.0
        for k, rank in enumerate(path):
            independent *= acceptance[k][rank]
        return (hits[path] + SMOOTHING * independent) / (total + SMOOTHING)

    return _as_json(total, acceptance, grow(value, NODES, heads))


def _as_json(
    positions: int, acceptance: list[list[float]], grown: list[tuple[Path, float]]
) -> dict[str, Any]:
    paths, values = [list(path) for path, _ in grown], [value for _, value in grown]
    return {"positions": positions, "acceptance": acceptance, "paths": paths, "values": values}


@dataclass
class Calibration:
    """What `measure` found, as a file holds it. positions: that were measured. teacher_forced:
    accepted length of a chain there."""

    positions: Size = 0
    acceptance: list[Annotated[list[Rate], MinLen(1)]] = field(default_factory=list)
    paths: Annotated[list[Annotated[list[int], MinLen(1)]], MaxLen(MOST_NODES)] = field(
        default_factory=list
    )
    values: list[Rate] = field(default_factory=list)
    teacher_forced: Size = 0


def problems(calibration: dict[str, Any], levels: int, vocabulary: int) -> list[str]:
    """Say what is wrong with a calibration that a file holds, "key: what"; []. An empty one is
    sound.

    levels: the most that a draft may have. vocabulary: tokens of the draft vocabulary."""
    ours = {k: v for k, v in calibration.items() if k in Calibration.__dataclass_fields__}
    known, found = from_json(ours, Calibration, "calibration.")
    if found:
        return found
    ranks = min(MOST_WIDTH, max(vocabulary, RANKS))  # measure() knows RANKS in any vocabulary
    have: set[Path] = set()
    for given in known.paths:  # a whole tree wherever it is cut off
        if len(given) > levels or not all(0 <= rank < ranks for rank in given):
            return [f"calibration.paths: no path of 1 to {levels} ranks below {ranks}"]
        *before, last = path = tuple(given)
        parent, elder = tuple(before), (*before, last - 1)
        if (before and parent not in have) or (last and elder not in have):
            return [f"calibration.paths: {given} comes before its parent or elder sibling"]
        have.add(path)
    return []


def assumed(depth: int, nodes: int = NODES, alike: bool = False) -> dict[str, Any]:
    """Return the calibration of a head that was not measured: published
    acceptance, falling off geometrically over ranks. alike: every level is accepted as the
    first, for a language model's distribution does not depend on the level."""
    table = []
    for level in range(MOST_DEPTH):
        top1, top5 = PUBLISHED[0 if alike else min(level, len(PUBLISHED) - 1)]
        table.append([top1, *((top5 - top1) / 2 * 0.5**r for r in range(RANKS - 1))])

    def value(path: Path) -> float:
        return math.prod(table[level][rank] for level, rank in enumerate(path))

    return _as_json(0, table, grow(value, nodes, depth))


def least_width(nodes: int, depth: int) -> int:
    """Return the least width with which a dynamic tree of `depth` levels has `nodes`
    candidates: width of the first level, and its square of every other one."""
    width = 1
    while width + (depth - 1) * width**2 < nodes:
        width += 1
    return min(width, MOST_WIDTH)


def tree(calibration: dict[str, Any], nodes: int, depth: int) -> TreeShape:
    """Return the tree of at most `nodes` nodes and `depth` levels for a calibration (an
    empty one: the generic tree)."""
    paths = calibration.get("paths") or assumed(depth)["paths"]
    return TreeShape.of([tuple(p) for p in paths[:nodes] if len(p) <= depth])
