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

from outrider.decode.cost import FREE, Price
from outrider.decode.drafters import Drafter
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree
from outrider.heads.shapes import Path

# Draft tokens accepted, nodes drafted: of a cycle that starts at some position.
Kept = tuple[int, int]


@dataclass(frozen=True)
class RecordedDraft:
    """One draft at one position. tokens, parents: node by node, parents first. score: the
    drafter's own order of nodes (cumulative log-probability), None for static shapes."""

    tokens: list[int]
    parents: list[int]
    score: list[float] | None


@dataclass
class CallTimes:
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
        self.drafts: dict[str, list[dict[int, RecordedDraft]]] = {name: [] for name in inners}
        self.clocks = {name: CallTimes() for name in inners}

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
        # The engine counts on no more nodes than this draft has, which is empty.
        rng.reserve(max(drafter.max_nodes for drafter in self.inners.values()))
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


def _draft(tree: DraftTree, row: int) -> RecordedDraft:
    size = int(tree.size[row])
    score: Any = getattr(tree, "score", None)
    return RecordedDraft(
        tree.tokens[row, :size].tolist(),
        tree.parents[row, :size].tolist(),
        None if score is None else score[row, :size].tolist(),
    )


# -- what a draft would have had accepted


def matched(draft: RecordedDraft, follows: Sequence[int]) -> list[int]:
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


def ranks(draft: RecordedDraft) -> list[Path]:
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
    drafts: dict[int, RecordedDraft]


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


@dataclass(frozen=True)
class Grown:
    """What a smaller tree takes of a recorded draft. places: of its accepted nodes, root
    first, in the order in which nodes are kept. nodes: of the whole tree. levels: drafted."""

    places: list[int]
    nodes: int
    levels: int

    def kept(self, nodes: int) -> Kept:
        """With at most so many nodes."""
        return sum(place < nodes for place in self.places), min(nodes, self.nodes)


class Beams:
    """Dynamic trees replayed from the largest one: fewer levels, fewer nodes and prices
    (decode.price) exactly, a smaller width closely (of the largest tree's candidates those are
    taken that a beam of that width would have seen)."""

    def __init__(self, texts: Sequence[Text]) -> None:
        # Of every draft: each node's path of ranks, and the nodes that agree with what follows.
        self.texts = [
            {t: (d, ranks(d), matched(d, text.tokens[t:])) for t, d in text.drafts.items()}
            for text in texts
        ]
        self.last: tuple[Any, list[dict[int, Grown]]] = (None, [])

    def of(
        self, depth: int, nodes: int, width: int, price: Price = FREE
    ) -> tuple[list[dict[int, Kept]], list[dict[int, int]]]:
        """Per text position -> (accepted, nodes), and per text position -> levels drafted, of
        trees of at most so many levels and nodes, `width` of which are expanded a level."""
        requested = (depth, width, price)
        if requested != self.last[0]:  # trees that differ in their nodes are asked for in a row
            self.last = (
                requested,
                [
                    {t: _grown(*recorded, *requested) for t, recorded in text.items()}
                    for text in self.texts
                ],
            )
        found = self.last[1]
        return (
            [{t: grown.kept(nodes) for t, grown in text.items()} for text in found],
            [{t: grown.levels for t, grown in text.items()} for text in found],
        )


def _grown(
    draft: RecordedDraft,
    paths: Sequence[Path],
    agreed: Sequence[int],
    depth: int,
    width: int,
    price: Price,
) -> Grown:
    """The tree that a drafter would have grown, of a draft whose candidates stand in a larger
    one."""
    assert draft.score is not None, "a dynamic tree comes with its scores"
    score, floor = draft.score, math.log(price.node) if price.node > 0 else -math.inf
    level, beam, found = 0, {-1}, list[int]()
    while level < depth:
        level += 1
        pays = [
            i
            for i, path in enumerate(paths)
            if len(path) == level
            and path[-1] < width
            and draft.parents[i] in beam
            and score[i] >= floor
        ]
        found += pays
        beam = set(sorted(pays, key=lambda i: -score[i])[:width])
        if not beam or sum(math.exp(score[i]) for i in beam) < price.level:
            break
    place = {node: n for n, node in enumerate(sorted(found, key=lambda i: -score[i]))}
    return Grown([place[i] for i in agreed if i in place], len(found), level)


# -- stepping through the texts


@dataclass(frozen=True)
class ReplayedCycle:
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
) -> list[ReplayedCycle]:
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
        steps.append(ReplayedCycle(t, drafted, accepted, tokens, clean, grown))
        t += tokens
    return steps


def walks(
    texts: Sequence[Text],
    kept: Sequence[dict[int, Kept]],
    depth: int,
    levels: Sequence[dict[int, int]] | None = None,
) -> list[list[ReplayedCycle]]:
    """`walk` of every text."""
    grown: Sequence[dict[int, int] | None] = levels or [None] * len(texts)
    rows = zip(texts, kept, grown, strict=True)
    return [walk(text, one, depth, more) for text, one, more in rows]


def accepted_length(cycles: Iterable[Sequence[ReplayedCycle]]) -> float:
    """Tokens per clean cycle."""
    clean = [s for steps in cycles for s in steps if s.clean]
    return sum(s.tokens for s in clean) / len(clean) if clean else 1.0
