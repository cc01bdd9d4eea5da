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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decode.drafters import Drafter
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree
from outrider.heads.shapes import Path

Kept = dict[int, int]  # position of a text -> draft tokens accepted in a cycle that starts there


@dataclass(frozen=True)
class RecordedDraft:
    """One draft at one position. tokens, parents: node by node, parents first. score: the
    drafter's own order of nodes (cumulative log-probability), None for static shapes."""

    tokens: list[int]
    parents: list[int]
    score: list[float] | None


class Shadow:
    """Lets several drafters of one head draft at every position, and proposes nothing to the
    target itself.

    drafts[name][request][t]: the draft behind t generated tokens (t >= 1).
    """

    name, shape = "shadow", "none"
    max_nodes = max_depth = 0

    def __init__(self, inners: dict[str, Drafter]):
        self.inners = inners
        taps = {tuple(d.taps) for d in inners.values()}
        assert len(taps) == 1, "drafters that read different features cannot share a run"
        self.taps = taps.pop()
        self.drafts: dict[str, list[dict[int, RecordedDraft]]] = {name: [] for name in inners}

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
        for drafter in self.inners.values():
            drafter.observe(tokens, feats, n, rows)
        for b in range(rows.start, rows.stop):
            self.length[b] += 1

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        # The engine counts on no more nodes than this draft has, which is empty.
        rng.reserve(max(drafter.max_nodes for drafter in self.inners.values()))
        for name, drafter in self.inners.items():
            tree = drafter.propose(torch.full_like(budget, drafter.max_depth), sampling, rng)
            for b, request in enumerate(self.live):
                self.drafts[name][request][self.length[b]] = _draft(tree, b)
        return DraftTree.empty(len(self.live), self.device)

    def select(self, rows: list[int]) -> None:
        for drafter in self.inners.values():
            drafter.select(rows)
        self.live, self.length = [self.live[r] for r in rows], [self.length[r] for r in rows]


def _draft(tree: DraftTree, row: int) -> RecordedDraft:
    size = int(tree.size[row])
    return RecordedDraft(
        tree.tokens[row, :size].tolist(),
        tree.parents[row, :size].tolist(),
        None if tree.score is None else tree.score[row, :size].tolist(),
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


def chain_of(found: Sequence[dict[int, Path]], k: int) -> list[Kept]:
    """Per text: what a chain of the first k best-ranked tokens gives, from the `paths` of longer
    chains or of trees."""
    return static_of(found, [(0,) * (depth + 1) for depth in range(k)])


def static_of(found: Sequence[dict[int, Path]], tree: Sequence[Path]) -> list[Kept]:
    """Per text: what a static tree gives, from the `paths` of a larger one."""
    have = {(), *tree}

    def depth(path: Path) -> int:
        return next(d for d in range(len(path), -1, -1) if path[:d] in have)

    return [{t: depth(path) for t, path in one.items()} for one in found]


class Beams:
    """Dynamic trees replayed from the largest one: fewer levels and fewer nodes exactly, a smaller
    width closely (of the largest tree's candidates those are taken that a beam of that width
    would have seen). places: per text position -> of every accepted node, root first, its place
    in the order in which nodes are kept."""

    def __init__(self, texts: Sequence[Text], depth: int, width: int) -> None:
        self.places = [
            {
                t: _places(draft, matched(draft, text.tokens[t:]), depth, width)
                for t, draft in text.drafts.items()
            }
            for text in texts
        ]

    def of(self, nodes: int) -> list[Kept]:
        """Per text: what a tree of at most so many nodes gives."""
        return [
            {t: sum(place < nodes for place in places) for t, places in text.items()}
            for text in self.places
        ]


def _places(draft: RecordedDraft, agreed: Sequence[int], depth: int, width: int) -> list[int]:
    """`Beams.places` of one draft. agreed: its nodes that agree with what followed."""
    assert draft.score is not None, "a dynamic tree comes with its scores"
    best = sorted(range(len(draft.score)), key=lambda i: -draft.score[i])  # type: ignore[index]
    paths, beam, found = ranks(draft), {-1}, set[int]()
    for level in range(1, depth + 1):
        seen = [
            i
            for i in best
            if len(paths[i]) == level and paths[i][-1] < width and draft.parents[i] in beam
        ]
        found.update(seen)
        beam = set(seen[:width])
    place = {node: n for n, node in enumerate(node for node in best if node in found)}
    return [place[i] for i in agreed if i in place]


# -- stepping through the texts


class ReplayedCycle(NamedTuple):
    """One cycle of a replay. tokens: committed, bonus included. clean: neither a stop token nor
    the limit cut it."""

    accepted: int
    tokens: int
    clean: bool


def walk(text: Text, kept: Kept, depth: int) -> list[ReplayedCycle]:
    """The cycles of one text, as the engine would make them with a draft of at most `depth`
    levels.
    """
    steps, t = [], 1
    while t < len(text.tokens):
        budget = min(text.limit - t - 1, depth)
        accepted = min(kept.get(t, 0), budget)
        tokens = min(accepted + 1, len(text.tokens) - t)
        steps.append(ReplayedCycle(accepted, tokens, budget == depth and tokens == accepted + 1))
        t += tokens
    return steps


def accepted_length(texts: Sequence[Text], kept: Sequence[Kept], depth: int) -> float:
    """Tokens per clean cycle of all texts."""
    cycles = [step for pair in zip(texts, kept, strict=True) for step in walk(*pair, depth)]
    clean = [step.tokens for step in cycles if step.clean]
    return sum(clean) / len(clean) if clean else 1.0
