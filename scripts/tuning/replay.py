"""Draft everything once, replay any setting: how many tokens each chain or tree would have had
accepted.

The target decodes plainly while drafters draft at every position without being verified
(`Shadow`). Where candidates are deterministic (greedy chains, top-k trees at any temperature,
n-grams), a cycle that starts at some position accepts just those that agree with the text, so
the accepted length of every smaller chain or tree follows from one run.

A cycle starts where the last one ended, which is not a random position: `walk` steps through
each text as the engine would, stop token and length limit included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.price import Price
from decode.rng import Rng
from decode.sampling import Sampling
from decode.tree import DraftTree
from heads.shapes import Path

Kept = tuple[
    int, int
]  # draft tokens accepted, nodes drafted: of a cycle that starts at some position


@dataclass(frozen=True)
class Draft:
    """One draft at one position. tokens, parents: node by node, parents first. score: the
    drafter's own order of nodes (cumulative log-probability), None for static shapes."""

    tokens: list[int]
    parents: list[int]
    score: list[float] | None


@dataclass
class Clock:
    """Seconds of single calls. propose: (rows, seconds). observe: (rows, most tokens of a row,
    seconds).
    """

    propose: list[tuple[int, float]] = field(default_factory=list)
    observe: list[tuple[int, int, float]] = field(default_factory=list)


class Shadow:
    """Lets several drafters of one head draft at every position, and proposes nothing to the
    target itself.

    drafts[name][request][t]: the draft behind t generated tokens (t >= 1). clocks[name]: what
    each call took.
    """

    name, shape = "shadow", "none"
    max_nodes = max_depth = 0

    def __init__(
        self,
        inners: dict[str, Drafter],
        keep: bool = True,
        sync: Callable[[], float] = time.perf_counter,
    ):
        """keep: whether to remember the drafts, or only what they cost. sync: a clock that
        waits for the device.
        """
        self.inners, self.keep, self.clock = inners, keep, sync
        taps = {tuple(d.taps) for d in inners.values()}
        assert len(taps) == 1, "drafters that read different features cannot share a run"
        self.taps = taps.pop()
        self.drafts: dict[str, list[dict[int, Draft]]] = {name: [] for name in inners}
        self.clocks = {name: Clock() for name in inners}

    def reset(self, rows: int, max_len: int) -> None:
        self.device = torch.device("cpu")
        self.live: list[int] = []  # request of every live row
        self.length: list[int] = []  # its generated tokens
        self.drafts = {name: [] for name in self.inners}
        for drafter in self.inners.values():
            drafter.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.device = prompts[0].device
        for name, drafter in self.inners.items():
            drafter.begin(prompts, sampling)
            self.drafts[name] += [{} for _ in prompts]
        known = len(self.drafts[name])
        self.live += range(known - len(prompts), known)
        self.length += [0] * len(prompts)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        fresh = self.length[rows.start] == 0  # the prompt: its time is the prefill's
        for name, drafter in self.inners.items():
            start = self.clock()
            drafter.observe(tokens, feats, n, rows)
            if not fresh:
                self.clocks[name].observe.append(
                    (len(self.live), int(n.max()), self.clock() - start)
                )
        for b in range(rows.start, rows.stop):
            self.length[b] += 1

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        for name, drafter in self.inners.items():
            start = self.clock()
            tree = drafter.propose(torch.full_like(budget, drafter.max_depth), sampling, rng)
            self.clocks[name].propose.append((len(self.live), self.clock() - start))
            if self.keep:
                for b, request in enumerate(self.live):
                    self.drafts[name][request][self.length[b]] = _draft(tree, b)
        return DraftTree.empty(len(self.live), self.device)

    def select(self, rows: list[int]) -> None:
        for drafter in self.inners.values():
            drafter.select(rows)
        self.live, self.length = [self.live[r] for r in rows], [self.length[r] for r in rows]


def _draft(tree: DraftTree, row: int) -> Draft:
    size = int(tree.size[row])
    score: Any = getattr(tree, "score", None)
    return Draft(
        tree.tokens[row, :size].tolist(),
        tree.parents[row, :size].tolist(),
        None if score is None else score[row, :size].tolist(),
    )


# -- what a draft would have had accepted


def matched(draft: Draft, follows: Sequence[int]) -> list[int]:
    """Nodes of the longest path that agrees with the tokens that followed."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    path, at = [], -1
    for token in follows:
        hit = next((c for c in children.get(at, ()) if draft.tokens[c] == token), None)
        if hit is None:
            break
        path.append(hit)
        at = hit
    return path


def ranks(draft: Draft) -> list[Path]:
    """Every node's path of sibling ranks."""
    seen: dict[int, int] = {}
    out: list[Path] = []
    for parent in draft.parents:
        rank = seen.get(parent, 0)
        seen[parent] = rank + 1
        out.append((*(out[parent] if parent >= 0 else ()), rank))
    return out


@dataclass(frozen=True)
class Text:
    """One answer. tokens: all generated ones. limit: most tokens it might have had. drafts: by
    generated tokens.
    """

    tokens: list[int]
    limit: int
    drafts: dict[int, Draft]


def paths(texts: Iterable[Text]) -> list[dict[int, Path]]:
    """Per text: position -> ranks of the candidates that agree with what followed."""
    return [
        {
            t: ranks(d)[m[-1]] if (m := matched(d, text.tokens[t:])) else ()
            for t, d in text.drafts.items()
        }
        for text in texts
    ]


def chain_of(texts: Sequence[Text], k: int) -> list[dict[int, Kept]]:
    """Per text: what a chain of the first k tokens of each draft would give. Drafts must be
    chains.
    """
    return [
        {
            t: (len(matched(d, text.tokens[t : t + k])), min(k, len(d.tokens)))
            for t, d in text.drafts.items()
        }
        for text in texts
    ]


def static_of(found: Sequence[dict[int, Path]], tree: Sequence[Path]) -> list[dict[int, Kept]]:
    """Per text: what a static tree gives, from the `paths` of a larger one."""
    have = {(), *tree}

    def depth(path: Path) -> int:
        return next(d for d in range(len(path), -1, -1) if path[:d] in have)

    return [{t: (depth(path), len(tree)) for t, path in one.items()} for one in found]


class Beams:
    """Dynamic trees replayed from the largest one: fewer levels and fewer nodes exactly, a
    smaller width closely (of the largest tree's candidates those are taken that a beam of that
    width would have seen)."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = texts
        self.known: dict[tuple[int, int], list[dict[int, tuple[list[int], int]]]] = {}

    def of(self, depth: int, nodes: int, width: int) -> list[dict[int, Kept]]:
        """Per text: position -> (accepted, nodes)."""
        if (depth, width) not in self.known:
            self.known[depth, width] = [
                {t: self._orders(d, text.tokens[t:], depth, width) for t, d in text.drafts.items()}
                for text in self.texts
            ]
        return [
            {t: (_prefix(orders, nodes), min(nodes, total)) for t, (orders, total) in one.items()}
            for one in self.known[depth, width]
        ]

    @staticmethod
    def _orders(
        draft: Draft, follows: Sequence[int], depth: int, width: int
    ) -> tuple[list[int], int]:
        """(place of every accepted node in the order of scores, nodes there are)."""
        assert draft.score is not None, "a dynamic tree comes with its scores"
        level: list[int] = []
        allowed: list[bool] = []
        for path, parent in zip(ranks(draft), draft.parents, strict=True):
            level.append(len(path) - 1)
            allowed.append(
                len(path) <= depth and path[-1] < width and (parent < 0 or allowed[parent])
            )
        score = draft.score
        for d in range(max(level, default=-1)):  # only the best `width` of a level are expanded
            here = sorted(
                (i for i, x in enumerate(level) if x == d and allowed[i]), key=lambda i: -score[i]
            )
            beam = set(here[:width])
            for i, parent in enumerate(draft.parents):
                if level[i] > d:
                    allowed[i] = (
                        allowed[i]
                        and (level[i] > d + 1 or parent in beam)
                        and (parent < 0 or allowed[parent])
                    )
        order = sorted((i for i, ok in enumerate(allowed) if ok), key=lambda i: -score[i])
        place = {node: i for i, node in enumerate(order)}
        agreed = matched(draft, follows)
        return [place[n] for n in agreed if n in place], len(order)


class Confident:
    """Dynamic trees with a price (decode.price), replayed from the largest one as `Beams` are.

    `of` gives per text: position -> (accepted, nodes), and position -> levels drafted."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = texts
        # Of every draft, node by node: its path of ranks, and whether what follows agrees with it.
        self.known = [
            {t: (ranks(d), set(matched(d, text.tokens[t:]))) for t, d in text.drafts.items()}
            for text in texts
        ]

    def of(
        self, depth: int, nodes: int, width: int, price: Price
    ) -> tuple[list[dict[int, Kept]], list[dict[int, int]]]:
        """Trees of at most so many levels and nodes, `width` of which are expanded a level."""
        kept: list[dict[int, Kept]] = []
        levels: list[dict[int, int]] = []
        for text, known in zip(self.texts, self.known, strict=True):
            kept.append({})
            levels.append({})
            for t, draft in text.drafts.items():
                some, grown = _grown(draft, known[t][0], depth, width, price)
                best = set(sorted(some, key=lambda i: -_score(draft, i))[:nodes])
                kept[-1][t] = len(best & known[t][1]), len(best)
                levels[-1][t] = grown
        return kept, levels


def _score(draft: Draft, node: int) -> float:
    assert draft.score is not None, "a dynamic tree comes with its scores"
    return draft.score[node]


def _grown(
    draft: Draft, paths: Sequence[Path], depth: int, width: int, price: Price
) -> tuple[list[int], int]:
    """(nodes that pay, levels drafted) of a draft whose candidates stand in a larger one."""
    floor = math.log(price.node) if price.node > 0 else -math.inf
    here = [i for i, path in enumerate(paths) if len(path) == 1 and path[0] < width]
    found: list[int] = []
    for level in range(1, depth + 1):
        here = sorted(
            (i for i in here if _score(draft, i) >= floor), key=lambda i: -_score(draft, i)
        )
        found += here
        beam = set(here[:width])
        worth = sum(math.exp(_score(draft, i)) for i in beam)
        if level == depth or not beam or worth < price.level:
            return found, level
        here = [
            i
            for i, path in enumerate(paths)
            if len(path) == level + 1 and path[-1] < width and draft.parents[i] in beam
        ]
    return found, depth


def _prefix(orders: Sequence[int], nodes: int) -> int:
    return next((i for i, place in enumerate(orders) if place >= nodes), len(orders))


# -- stepping through the texts


@dataclass(frozen=True)
class Step:
    """One cycle of a replay. start: generated tokens before it. nodes: drafted. tokens:
    committed, bonus included.

    clean: neither a stop token nor the limit cut it. levels: drafted, None: those of the shape."""

    start: int
    nodes: int
    accepted: int
    tokens: int
    clean: bool
    levels: int | None = None


def walk(
    text: Text, kept: dict[int, Kept], depth: int, levels: dict[int, int] | None = None
) -> list[Step]:
    """The cycles of one text, as the engine would make them with a draft of at most `depth`
    levels; levels: how many are drafted at each position, None: all of them.
    """
    steps, t = [], 1
    while t < len(text.tokens):
        budget = min(text.limit - t - 1, depth)
        accepted, nodes = kept.get(t, (0, 0))
        accepted = min(accepted, budget)
        tokens = min(accepted + 1, len(text.tokens) - t)
        clean = budget == depth and tokens == accepted + 1
        drafted = min(nodes, max(budget, round(nodes * budget / max(depth, 1)))) if budget else 0
        grown = None if levels is None else min(levels.get(t, 0), budget)
        steps.append(Step(t, drafted, accepted, tokens, clean, grown))
        t += tokens
    return steps


def accepted_length(cycles: Iterable[Sequence[Step]]) -> float:
    """Tokens per clean cycle."""
    clean = [s for steps in cycles for s in steps if s.clean]
    return sum(s.tokens for s in clean) / len(clean) if clean else 1.0
