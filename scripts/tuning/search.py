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

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.price import Price
from heads import shapes
from heads.shapes import Path
from heads.tuned import Settings
from scripts.tuning import replay
from scripts.tuning.cost import PARTS, CostModel, Shape
from scripts.tuning.replay import Kept, Step, Text

PRIOR = 60.0  # recorded positions that the head's own calibration (or independence) is worth


@dataclass(frozen=True)
class Candidate:
    """A setting with what is expected of it. shape: a full draft. steps: replayed cycles per
    text (for a batch of one).
    rates: accepted at or beyond each level where nothing can be replayed (sampled drafts)."""

    settings: Settings
    kind: str
    shape: Shape
    expected: dict[str, Any] = field(hash=False)


def evaluate(
    model: CostModel, batch: int, shape: Shape, kind: str, cycles: Sequence[Sequence[Step]]
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
        drafted = Shape(depth, width, shape.width)
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


def _passes(cycles: Sequence[Sequence[Step]], batch: int) -> list[tuple[int, int, int | None]]:
    """(nodes of the widest draft, live rows, levels of the deepest draft or None for those of the
    shape) of every pass of the engine."""
    if batch == 1:
        return [(s.nodes, 1, s.levels) for steps in cycles for s in steps]
    queue = [list(steps) for steps in cycles if steps][::-1]
    live: list[list[Step]] = []
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


def _plain_passes(cycles: Sequence[Sequence[Step]], batch: int) -> Counter[int]:
    """How many passes of how many live rows plain decoding would need for the same tokens."""
    single = [[Step(0, 0, 0, 1, True)] * sum(s.tokens for s in steps) for steps in cycles]
    return Counter(live for _, live, _ in _passes(single, batch))


# -- chains, n-grams


def chains(model: CostModel, batch: int, texts: Sequence[Text], deepest: int) -> list[Candidate]:
    """Chains of 1 .. deepest; also n-grams, whose drafts are of any length up to that."""
    out = []
    for k in range(1, deepest + 1):
        kept = replay.chain_of(texts, k)
        shape = Shape(k, k)
        cycles = [replay.walk(text, one, k) for text, one in zip(texts, kept, strict=True)]
        expected = evaluate(model, batch, shape, "chain", cycles)
        out.append(Candidate(Settings("chain", depth=k), "chain", shape, expected))
    return out


def sampled_chains(model: CostModel, batch: int, unconditional: Sequence[float]) -> list[Candidate]:
    """Chains drawn from the drafter's law (T > 0) cannot be replayed: acceptance by position
    comes from real cycles.
    """
    from scripts.tuning.cost import length_of_chain

    out = []
    for k in range(1, len(unconditional) + 1):
        shape = Shape(k, k)
        expected = model.predict(batch, shape, "chain", length_of_chain(unconditional, k))
        out.append(Candidate(Settings("chain", depth=k), "chain", shape, expected))
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


def static_trees(
    model: CostModel,
    batch: int,
    texts: Sequence[Text],
    calibration: dict[str, Any],
    heads: int,
    most: int,
) -> list[Candidate]:
    """The best tree for every (levels, nodes). Its accepted length is replayed with trees
    grown from the other half of the texts, so that a tree is not flattered by the hits it was
    fitted to."""
    found = replay.paths(texts)
    halves = [list(range(i, len(texts), 2)) for i in (0, 1)] if len(texts) > 1 else [[0]]
    out = []
    for depth in range(1, heads + 1):
        whole = [p for p, _ in shapes.grow(value_of(found, calibration, heads), most, depth)]
        folds = []
        for half in halves:
            rest = [found[i] for i in range(len(texts)) if i not in half] or found
            folds.append(
                [p for p, _ in shapes.grow(value_of(rest, calibration, heads), most, depth)]
            )
        for nodes in range(1, len(whole) + 1):
            tree = whole[:nodes]
            levels = max(map(len, tree))
            if levels < depth:
                continue  # stands among those of a smaller depth limit
            cycles = []
            for half, fold in zip(halves, folds, strict=True):
                kept = replay.static_of([found[i] for i in half], fold[:nodes])
                cycles += [
                    replay.walk(texts[i], one, levels) for i, one in zip(half, kept, strict=True)
                ]
            shape = Shape(levels, nodes)
            settings = Settings(
                "tree",
                depth=levels,
                nodes=nodes,
                paths=tuple(sorted(tree, key=lambda p: (len(p), p))),
            )
            out.append(
                Candidate(settings, "tree", shape, evaluate(model, batch, shape, "tree", cycles))
            )
    return out


# -- dynamic trees


def dynamic_trees(
    model: CostModel,
    batch: int,
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
                kept: list[dict[int, Kept]] = beams.of(depth, n, width)
                cycles = [
                    replay.walk(text, one, depth) for text, one in zip(texts, kept, strict=True)
                ]
                shape = Shape(depth, n, width)
                out.append(
                    Candidate(
                        Settings("tree", depth=depth, nodes=n, width=width),
                        "tree",
                        shape,
                        evaluate(model, batch, shape, "tree", cycles),
                    )
                )
    return out


# Prices that are tried, in kept tokens: of a node, and of a level.
NODE_PRICES = (0.02, 0.04, 0.06, 0.09, 0.13, 0.2)
LEVEL_PRICES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7)
MOST_PRICED = 32  # nodes of a tree with a price, which hardly ever come together


def priced_trees(
    model: CostModel,
    batch: int,
    texts: Sequence[Text],
    depth: int,
    nodes: int,
    widths: Sequence[int],
) -> list[Candidate]:
    """Trees that the drafter's own confidence grows, for every price and beam width."""
    confident, out = replay.Confident(texts), []
    for width in widths:
        most = min(nodes, width + (depth - 1) * width**2)
        for node in NODE_PRICES:
            for level in LEVEL_PRICES:
                price = Price(node, level)
                kept, levels = confident.of(depth, most, width, price)
                found = zip(texts, kept, levels, strict=True)
                cycles = [replay.walk(text, one, depth, grown) for text, one, grown in found]
                shape = Shape(depth, most, width)
                settings = Settings("tree", depth=depth, nodes=most, width=width, price=price)
                expected = evaluate(model, batch, shape, "tree", cycles)
                out.append(Candidate(settings, "tree", shape, expected))
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
    if a.kind != b.kind:
        return True
    pairs = (
        (a.shape.nodes, b.shape.nodes),
        (a.shape.depth, b.shape.depth),
        (a.shape.width, b.shape.width),
    )
    return any(max(x, y) >= 1.25 * min(x, y) for x, y in pairs)


def grid(candidates: Sequence[Candidate], per_kind: int) -> list[Candidate]:
    """An even subset of everything that could be chosen, whatever is expected of it: sizes in
    powers of two, every depth of a chain. At most `per_kind` of a kind, spread over the list."""
    out: list[Candidate] = []
    for kind in dict.fromkeys(c.kind for c in candidates):
        every = [
            c
            for c in candidates
            if c.kind == kind and (kind == "chain" or _power_of_two(c.shape.nodes))
        ]
        step = max(len(every) / per_kind, 1.0)
        out += [every[int(i * step)] for i in range(min(per_kind, len(every)))]
    return out


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def same(a: Settings, b: Settings) -> bool:
    """Whether two settings draft the same."""
    return a.to_json() == b.to_json()
