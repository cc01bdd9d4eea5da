"""Which settings are worth measuring: every chain, static and dynamic tree within bounds,
priced by the cost model.

Static trees come from a dynamic programme over (levels, nodes): the value of a node is the
chance that its whole path is right, no child is worth more than its parent, so the best tree
of n nodes is the best one of n - 1 and the most valuable node at its border, exactly
(heads/shapes.py). One such sequence per depth limit covers every (levels, nodes). Each
setting's accepted length is replayed on the recorded texts (trees on texts they were not grown
from) and its time follows from the latency curves: a larger tree is kept only while it pays.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from outrider.decode.cost import Price
from outrider.heads import shapes
from outrider.heads.shapes import Path
from outrider.heads.tuned import DraftSettings
from outrider.scripts.tuning import replay
from outrider.scripts.tuning.cost import PARTS, CostModel, CycleShape, length_of_chain
from outrider.scripts.tuning.replay import Kept, ReplayedCycle, Text

PRIOR = 60.0  # recorded positions that the head's own calibration (or independence) is worth


@dataclass(frozen=True)
class Candidate:
    """A setting with what is expected of it. shape: a full draft."""

    settings: DraftSettings
    expected: dict[str, Any] = field(hash=False)

    @property
    def kind(self) -> str:
        return self.settings.shape

    @property
    def shape(self) -> CycleShape:
        return CycleShape.of(self.settings)


def evaluate(
    model: CostModel,
    batch: int,
    shape: CycleShape,
    kind: str,
    cycles: Sequence[Sequence[ReplayedCycle]],
) -> dict[str, Any]:
    """Predicted tokens/s of replayed cycles: every cycle is priced by the nodes it drafted;
    `batch` rows run together, those that finish give way to waiting ones."""
    tokens = sum(s.tokens for steps in cycles for s in steps)
    count = sum(len(steps) for steps in cycles)
    if not count:
        return {
            "accepted_length": 1.0,
            "tokens_per_second": 0.0,
            "speedup": 0.0,
            "cycle_ms": 0.0,
            "break_even": 1.0,
            "parts_ms": {},
        }
    mean = tokens / count
    total, passes = 0.0, 0
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    full = shape.nodes
    for width, live, levels in _passes(cycles, batch):
        # A draft without a price costs the drafter its whole shape even where the last levels
        # are cut.
        depth = (shape.depth if width else 0) if levels is None else levels
        drafted = CycleShape(depth, width, shape.width)
        whole = levels is None and width == full
        price = model.cycle(live, shape if whole else drafted, kind, mean)
        total += price.ms
        passes += 1
        for name, ms in price.to_json().items():
            parts[name] += ms
    plain = sum(model.plain(live) * n for live, n in _plain_passes(cycles, batch).items())
    return {
        "accepted_length": replay.accepted_length(cycles),
        "cycle_ms": total / passes,
        "parts_ms": {name: ms / passes for name, ms in parts.items()},
        "tokens_per_second": 1000 * tokens / total,
        "speedup": plain / total,
        "break_even": model.break_even(batch, shape, kind, mean),
    }


def _passes(
    cycles: Sequence[Sequence[ReplayedCycle]], batch: int
) -> list[tuple[int, int, int | None]]:
    """(nodes of the widest draft, live rows, levels of the deepest draft or None for those of
    the shape) of every pass of the engine."""
    if batch == 1:
        return [(s.nodes, 1, s.levels) for steps in cycles for s in steps]
    queue = [list(steps) for steps in cycles if steps][::-1]
    live: list[list[ReplayedCycle]] = []
    out = []
    while queue or live:
        while queue and len(live) < batch:
            live.append(queue.pop()[::-1])
        now = [row.pop() for row in live]
        grown = [s.levels for s in now if s.levels is not None]
        deepest = max(grown) if len(grown) == len(now) else None
        out.append((max(s.nodes for s in now), len(live), deepest))
        live = [row for row in live if row]
    return out


def _plain_passes(cycles: Sequence[Sequence[ReplayedCycle]], batch: int) -> Counter[int]:
    """How many passes of how many live rows plain decoding would need for the same tokens."""
    single = [[ReplayedCycle(0, 0, 0, 1, True)] * sum(s.tokens for s in steps) for steps in cycles]
    return Counter(live for _, live, _ in _passes(single, batch))


@dataclass(frozen=True)
class Pricing:
    """What settings are priced by, for `batch` rows together."""

    model: CostModel
    batch: int

    def of(self, settings: DraftSettings, cycles: Sequence[Sequence[ReplayedCycle]]) -> Candidate:
        """Settings with what is expected of their replayed cycles."""
        shape = CycleShape.of(settings)
        return Candidate(settings, evaluate(self.model, self.batch, shape, settings.shape, cycles))


# -- chains, n-grams


def chains(
    pricing: Pricing,
    texts: Sequence[Text],
    deepest: int,
    kept: Callable[[int], list[dict[int, Kept]]],
) -> list[Candidate]:
    """Chains of 1 .. deepest; also n-grams, whose drafts are of any length up to that. kept:
    per text, what a chain of so many tokens gives."""
    return [
        pricing.of(DraftSettings("chain", depth=k), replay.walks(texts, kept(k), k))
        for k in range(1, deepest + 1)
    ]


def sampled_chains(pricing: Pricing, unconditional: Sequence[float]) -> list[Candidate]:
    """Chains drawn from the drafter's distribution (T > 0) cannot be replayed: acceptance by
    position comes from real cycles.
    """
    out = []
    for k in range(1, len(unconditional) + 1):
        length = length_of_chain(unconditional, k)
        expected = pricing.model.predict(pricing.batch, CycleShape(k, k), "chain", length)
        out.append(Candidate(DraftSettings("chain", depth=k), expected))
    return out


# -- static trees


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
    stored = zip(calibration.get("paths", ()), calibration.get("values", ()), strict=False)
    known = {tuple(p): float(v) for p, v in stored}
    table = calibration.get("acceptance") or []
    if not known and not table:
        known = dict(shapes.generic(heads))

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


def static_tree(value: Callable[[Path], float], nodes: int, depth: int) -> list[Path]:
    """The best tree of so many nodes and levels, the most valuable nodes first."""
    return [path for path, _ in shapes.grow(value, nodes, depth)]


def static_settings(tree: Sequence[Path]) -> DraftSettings:
    """What asks for a static tree."""
    paths = tuple(sorted(tree, key=lambda p: (len(p), p)))
    return DraftSettings("tree", depth=max(map(len, paths)), nodes=len(paths), paths=paths)


def static_trees(
    pricing: Pricing,
    texts: Sequence[Text],
    calibration: dict[str, Any],
    heads: int,
    most: int,
) -> list[Candidate]:
    """The best tree for every (levels, nodes). Its accepted length is replayed with trees
    grown from the other half of the texts, so that a tree is not flattered by the hits it was
    fitted to."""
    found = replay.paths(texts)
    halves = [slice(0, None, 2), slice(1, None, 2)] if len(texts) > 1 else [slice(None)]
    values = [value_of(found[rest], calibration, heads) for rest in reversed(halves)]
    own, out = value_of(found, calibration, heads), []
    for depth in range(1, heads + 1):
        whole = static_tree(own, most, depth)
        folds = [static_tree(value, most, depth) for value in values]
        for nodes in range(1, len(whole) + 1):
            settings = static_settings(whole[:nodes])
            if settings.depth != depth:
                continue  # stands among those of a smaller depth limit
            cycles = []
            for half, fold in zip(halves, folds, strict=True):
                kept = replay.static_of(found[half], fold[:nodes])
                cycles += replay.walks(texts[half], kept, depth)
            out.append(pricing.of(settings, cycles))
    return out


# -- dynamic trees


def dynamic_trees(
    pricing: Pricing,
    texts: Sequence[Text],
    depths: Sequence[int],
    nodes: Sequence[int],
    widths: Sequence[int],
) -> list[Candidate]:
    """Trees grown by the drafter's own probabilities, for every (levels, nodes, width)."""
    beams, out = replay.Beams(texts), []
    for depth in depths:
        for width in widths:
            for n in nodes:
                if n < depth or n > width + max(depth - 1, 0) * width * width:
                    continue
                kept, _ = beams.of(depth, n, width)
                settings = DraftSettings("tree", depth=depth, nodes=n, width=width)
                out.append(pricing.of(settings, replay.walks(texts, kept, depth)))
    return out


# Prices that are tried, in kept tokens: of a node, and of a level.
NODE_PRICES = (0.02, 0.04, 0.06, 0.09, 0.13, 0.2)
LEVEL_PRICES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7)
# Most nodes of a tree with a price that are tried. 32 hardly ever come together; fewer pay where a
# pass costs a step more from some number of tokens on, as with kernels that take six rows at once.
PRICED_NODES = (3, 5, 8, 11, 16, 32)


def priced_trees(
    pricing: Pricing, texts: Sequence[Text], depth: int, most: int, widths: Sequence[int]
) -> list[Candidate]:
    """Trees of up to `most` nodes that the drafter's own confidence grows, for every price and
    beam width."""
    beams, out = replay.Beams(texts), []
    for width in widths:
        whole = min(most, width + (depth - 1) * width**2)
        for price in itertools.starmap(Price, itertools.product(NODE_PRICES, LEVEL_PRICES)):
            for nodes in sorted({min(whole, n) for n in PRICED_NODES}):
                kept, levels = beams.of(depth, nodes, width, price)
                settings = DraftSettings("tree", depth, nodes, width, price=price)
                out.append(pricing.of(settings, replay.walks(texts, kept, depth, levels)))
    return out


# -- choosing


def best_few(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The fastest by prediction, then others that are really different: the best of the other
    kind, and of each kind those whose size or depth differs by a quarter from all that are in."""
    ranked = sorted(candidates, key=lambda c: -c.expected["tokens_per_second"])
    chosen: list[Candidate] = []
    for kind in dict.fromkeys(c.kind for c in ranked):
        chosen.append(next(c for c in ranked if c.kind == kind))
    for c in ranked:
        if len(chosen) >= count:
            break
        if all(_differs(c, other) for other in chosen):
            chosen.append(c)
    return sorted(chosen[: max(count, 1)], key=lambda c: -c.expected["tokens_per_second"])


def best_prices(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of settings with a price the fastest by prediction, and the fastest of those whose nodes
    cost half as much or less, or twice as much or more."""
    ranked = sorted(candidates, key=lambda c: -c.expected["tokens_per_second"])
    prices = [c.settings.price.node for c in ranked if c.settings.price]
    far = [c for c, node in zip(ranked, prices, strict=True) if not 0.5 < node / prices[0] < 2]
    return [*ranked[:1], *far[:1]]


def _differs(a: Candidate, b: Candidate) -> bool:
    pairs = zip(astuple(a.shape), astuple(b.shape), strict=True)
    return a.kind != b.kind or any(max(x, y) >= 1.25 * min(x, y) for x, y in pairs)
