"""Which settings are worth timing: chains, static and dynamic trees of a few sizes, with the
accepted length that each would have had on the recorded texts.

Static trees are grown best-first by the value of a node, the chance that its whole path is right:
the best tree of n nodes is the best one of n - 1 and the most valuable node at its border
(heads/shapes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.heads import shapes
from outrider.heads.shapes import Path
from outrider.heads.tuned import DraftSettings
from outrider.scripts.tuning import replay
from outrider.scripts.tuning.replay import Text

PRIOR = 60.0  # recorded positions that the head's own calibration (or independence) is worth
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of chains and dynamic trees
SIZES = (4, 8, 16, 32, 64, 128)  # nodes of trees
WIDTHS = (2, 3, 4, 6, 8, 12, 16)  # of dynamic trees


@dataclass(frozen=True)
class Candidate:
    """A setting with the accepted length that replay says it has."""

    settings: DraftSettings
    accepted_length: float

    @property
    def cost(self) -> tuple[int, int]:
        """What its cycles take longer with: levels drafted, nodes verified."""
        depth = self.settings.depth or 0
        return depth, self.settings.nodes or depth


def within(values: Sequence[int], most: int) -> list[int]:
    """Those below `most`, and `most`."""
    return [value for value in values if value < most] + [most]


def chains(texts: Sequence[Text], deepest: int) -> list[Candidate]:
    """Chains of up to `deepest` tokens; also n-grams, whose drafts are of any length up to that."""
    found = replay.paths(texts)
    return [
        Candidate(
            DraftSettings("chain", depth=k),
            replay.accepted_length(texts, replay.chain_of(found, k), k),
        )
        for k in within(DEPTHS, deepest)
    ]


def value_of(
    found: Sequence[dict[int, Path]], calibration: dict[str, Any], heads: int
) -> Callable[[Path], float]:
    """The chance that a path is right: recorded hits, smoothed by the head's calibration where
    it knows the path, else by the product of its rank-wise acceptance."""
    hits: Counter[Path] = Counter()
    total = 0
    for one in found:
        for path in one.values():
            total += 1
            for d in range(1, len(path) + 1):
                hits[path[:d]] += 1
    if not calibration.get("paths") and not calibration.get("acceptance"):
        calibration = shapes.assumed(heads)
    stored = zip(calibration.get("paths", ()), calibration.get("values", ()), strict=False)
    known = {tuple(p): float(v) for p, v in stored}
    table = calibration.get("acceptance", ())

    def prior(path: Path) -> float:
        if path in known:
            return known[path]
        value = 1.0
        for level, rank in enumerate(path):
            value *= table[level][rank] if level < len(table) and rank < len(table[level]) else 0.0
        return min(value, prior(path[:-1])) if len(path) > 1 else value

    def value(path: Path) -> float:
        own = (hits[path] + PRIOR * prior(path)) / (total + PRIOR)
        return own if len(path) == 1 else min(own, value(path[:-1]))

    return value


def static_settings(value: Callable[[Path], float], nodes: int, depth: int) -> DraftSettings:
    """What asks for the best static tree of so many nodes and levels."""
    tree = [path for path, _ in shapes.grow(value, nodes, depth)]
    paths = tuple(sorted(tree, key=lambda p: (len(p), p)))
    return DraftSettings("tree", depth=max(map(len, paths)), nodes=len(paths), paths=paths)


def static_trees(
    texts: Sequence[Text], calibration: dict[str, Any], heads: int, most: int
) -> list[Candidate]:
    """The best tree of every size for what was recorded."""
    found, out = replay.paths(texts), []
    value = value_of(found, calibration, heads)
    for nodes in within(SIZES, most):
        settings = static_settings(value, nodes, heads)
        kept = replay.static_of(found, settings.paths or ())
        length = replay.accepted_length(texts, kept, settings.depth or 0)
        out.append(Candidate(settings, length))
    return out


def dynamic_trees(texts: Sequence[Text], depth: int, nodes: int, width: int) -> list[Candidate]:
    """Trees grown by the drafter's own probabilities, up to such levels, nodes and width: for every
    number of levels and nodes the width that accepts most."""
    best: dict[tuple[int, int], Candidate] = {}
    for levels in within(DEPTHS, depth):
        for wide in within(WIDTHS, width):
            beams = replay.Beams(texts, levels, wide)
            for n in within(SIZES, nodes):
                if n < levels or n > wide + (levels - 1) * wide**2:
                    continue
                length = replay.accepted_length(texts, beams.of(n), levels)
                one = Candidate(DraftSettings("tree", levels, n, wide), length)
                best[levels, n] = max(
                    best.get((levels, n), one), one, key=lambda c: c.accepted_length
                )
    return list(best.values())


def worth_timing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other one of the same shape accepts as much with no more levels and no
    more nodes."""
    return [
        one
        for one in candidates
        if not any(
            other.settings.shape == one.settings.shape
            and other.cost != one.cost
            and all(a <= b for a, b in zip(other.cost, one.cost, strict=True))
            and other.accepted_length >= one.accepted_length
            for other in candidates
        )
    ]
