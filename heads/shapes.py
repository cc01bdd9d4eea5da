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
from typing import Any

from torch import Tensor

from outrider.decode.tree import TreeShape
from outrider.heads.limits import MOST_DEPTH, MOST_NODES, MOST_WIDTH

RANKS = 10  # ranks 0..9 are candidates; RANKS itself marks a miss
NODES = 64  # nodes of the stored tree; smaller trees are its first nodes
SMOOTHING = 20.0  # how many measured positions the independence estimate is worth
# Acceptance of Vicuna-7B's heads as published (Cai et al. 2024): top-1 and top-5; what an
# uncalibrated head assumes.
PUBLISHED = ((0.560, 0.780), (0.316, 0.562), (0.201, 0.417), (0.147, 0.340), (0.118, 0.300))

Path = tuple[int, ...]


def grow(
    value: Callable[[Path], float], nodes: int, depth: int, ranks: int = RANKS
) -> list[tuple[Path, float]]:
    """Best-first growth: up to `nodes` paths with their values; any prefix of the list is
    itself a whole tree.

    A path enters the frontier after its parent and its elder sibling.
    """
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
    """Calibration of a head. ranks: [A, K] int64, rank of the right token at A positions,
    RANKS for a miss.

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

    grown = grow(value, NODES, heads)
    return {
        "positions": total,
        "acceptance": acceptance,
        "paths": [list(p) for p, _ in grown],
        "values": [v for _, v in grown],
    }


def problems(calibration: dict[str, Any], levels: int, vocabulary: int) -> list[str]:
    """What is wrong with a calibration that a file holds, "key: what"; []. An empty one is
    sound.

    levels: the most that a draft may have. vocabulary: tokens of the draft vocabulary.
    """
    table, values = calibration.get("acceptance", []), calibration.get("values", [])
    numbers = [calibration.get(key, 0) for key in ("positions", "teacher_forced")]
    found = []
    if not isinstance(table, list) or not all(isinstance(row, list) and row for row in table):
        found.append("calibration.acceptance: is no list of rates by level and rank")
    elif not isinstance(values, list) or not all(
        _number(rate, 1) for rate in [*values, *(a for row in table for a in row)]
    ):
        found.append("calibration: holds an acceptance rate outside 0..1")
    if not all(_number(n, math.inf) for n in numbers):
        found.append("calibration: positions and teacher_forced must be numbers from 0 on")
    ranks = min(MOST_WIDTH, max(vocabulary, RANKS))  # measure() knows RANKS in any vocabulary
    return found + _path_problems(calibration.get("paths", []), levels, ranks)


def _number(value: Any, most: float) -> bool:
    """Whether it is one, from 0 to `most`, and finite."""
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    return sound and 0 <= value <= most and value != math.inf


def _path_problems(paths: Any, levels: int, ranks: int) -> list[str]:
    """A list of paths must be a whole tree wherever it is cut off."""
    if not isinstance(paths, list) or len(paths) > MOST_NODES:
        return [f"calibration.paths: is no list of at most {MOST_NODES} paths"]
    have: set[Path] = set()
    for given in paths:
        sound = isinstance(given, list) and 0 < len(given) <= levels
        if not sound or any(type(r) is not int or not 0 <= r < ranks for r in given):
            return [f"calibration.paths: a path is no list of 1 to {levels} ranks below {ranks}"]
        path = tuple(given)
        before = [path[:-1]] if len(path) > 1 else []
        before += [(*path[:-1], path[-1] - 1)] if path[-1] else []
        if not have.issuperset(before):
            return [f"calibration.paths: {given} stands before its parent or its elder sibling"]
        have.add(path)
    return []


def generic(heads: int) -> list[tuple[Path, float]]:
    """The tree for a head that was never calibrated: published acceptance, falling off
    geometrically over ranks.
    """
    table = []
    for k in range(heads):
        top1, top5 = PUBLISHED[min(k, len(PUBLISHED) - 1)]
        tail = (top5 - top1) / 4
        table.append([top1, *(2 * tail * 0.5**r for r in range(RANKS - 1))])

    def value(path: Path) -> float:
        product = 1.0
        for k, rank in enumerate(path):
            product *= table[k][rank]
        return product

    return grow(value, NODES, heads)


def even(depth: int, nodes: int = NODES) -> dict[str, Any]:
    """What stands in for the calibration of a separate model that nobody has measured, with a
    tree of `depth` levels and `nodes` nodes: every level is accepted as the first of the
    published heads, for a language model's distribution does not depend on the level."""
    top1, top5 = PUBLISHED[0]
    level = [top1, *((top5 - top1) / 2 * 0.5**r for r in range(RANKS - 1))]

    def value(path: Path) -> float:
        return math.prod(level[rank] for rank in path)

    grown = grow(value, nodes, depth)
    return {
        "positions": 0,
        "acceptance": [level] * MOST_DEPTH,
        "paths": [list(p) for p, _ in grown],
        "values": [v for _, v in grown],
    }


def least_width(nodes: int, depth: int) -> int:
    """Least width with which a dynamic tree of `depth` levels has `nodes` candidates: width of
    the first level, and its square of every other one."""
    width = 1
    while width + (depth - 1) * width**2 < nodes:
        width += 1
    return min(width, MOST_WIDTH)


def tree(calibration: dict[str, Any], nodes: int, depth: int) -> TreeShape:
    """The tree of at most `nodes` nodes and `depth` levels for a calibration (an empty one:
    the generic tree)."""
    paths = [tuple(p) for p in calibration.get("paths", ())] or [p for p, _ in generic(depth)]
    return TreeShape.of([p for p in paths[:nodes] if len(p) <= depth])
