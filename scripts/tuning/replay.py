"""Draft everything once, replay any setting: how many tokens each chain or tree would have had
accepted.

The target decodes plainly while drafters draft greedily at every position without being verified
(`Shadow`). A cycle that starts at some position accepts just the candidates that agree with the
text, so the accepted length of every smaller chain or tree follows from one run. At T > 0 the text
is drawn: what drawn candidates would have had accepted is not told, but which sizes are worth
measuring.

A cycle starts where the last one ended, which is not a random position: `walk` steps through
each text as the engine would, stop token and length limit included.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    @functools.cached_property
    def ranks(self) -> list[Path]:
        """Every node's path of sibling ranks."""
        seen, out = Counter[int](), list[Path]()
        for parent in self.parents:
            out.append((*(out[parent] if parent >= 0 else ()), seen[parent]))
            seen[parent] += 1
        return out

    def agreed(self, follows: Sequence[int]) -> list[int]:
        """Return nodes of the longest path that agrees with the tokens that followed."""
        node_of = {
            (p, t): i for i, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path, at = [], -1
        for token in follows:
            if (at := node_of.get((at, token), -1)) < 0:
                break
            path.append(at)
        return path


class Shadow:
    """Lets several drafters of one head draft at every position of one answer, and proposes
    nothing to the target itself.

    drafts[name][t]: the draft behind t generated tokens (t >= 1).
    """

    name, shape = "shadow", "none"
    max_nodes = max_depth = 0

    def __init__(self, inners: dict[str, Drafter]):
        self.inners = inners
        taps = {tuple(d.taps) for d in inners.values()}
        assert len(taps) == 1, "drafters that read different features cannot share a run"
        self.taps = taps.pop()

    def reset(self, rows: int, max_len: int) -> None:
        assert rows == 1, "a shadow follows one answer"
        self.length = 0  # generated tokens
        self.drafts: dict[str, dict[int, RecordedDraft]] = {name: {} for name in self.inners}
        for drafter in self.inners.values():
            drafter.reset(rows, max_len)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.device = prompts[0].device
        for drafter in self.inners.values():
            drafter.begin(prompts, replace(sampling, temperature=0.0))

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        self.length += 1
        for drafter in self.inners.values():
            drafter.observe(tokens, feats, n, rows)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        # The engine counts on no more nodes than this draft has, which is empty.
        rng.reserve(max(drafter.max_nodes for drafter in self.inners.values()))
        for name, drafter in self.inners.items():
            most = torch.full_like(budget, drafter.max_depth)
            tree = drafter.propose(most, replace(sampling, temperature=0.0), rng)
            self.drafts[name][self.length] = _draft(tree)
        return DraftTree.empty(1, self.device)

    def select(self, rows: list[int]) -> None:
        for drafter in self.inners.values():
            drafter.select(rows)


def _draft(tree: DraftTree) -> RecordedDraft:
    size = int(tree.size[0])
    score = None if tree.score is None else tree.score[0, :size].tolist()
    return RecordedDraft(tree.tokens[0, :size].tolist(), tree.parents[0, :size].tolist(), score)


# -- what a draft would have had accepted


@dataclass(frozen=True)
class Text:
    """One answer. tokens: all generated ones. limit: most tokens it might have had. drafts: by
    generated tokens.
    """

    tokens: list[int]
    limit: int
    drafts: dict[int, RecordedDraft]

    @functools.cached_property
    def agreed(self) -> dict[int, list[int]]:
        """Position -> nodes of its draft that agree with what followed, root first."""
        return {t: draft.agreed(self.tokens[t:]) for t, draft in self.drafts.items()}

    @functools.cached_property
    def paths(self) -> dict[int, Path]:
        """Position -> ranks of the candidates that agree with what followed."""
        return {t: self.drafts[t].ranks[m[-1]] if m else () for t, m in self.agreed.items()}


def chain_of(texts: Sequence[Text], k: int) -> list[Kept]:
    """Return for each text what a chain of the first k best-ranked tokens gives, from longer
    chains or from trees."""
    return static_of(texts, [(0,) * (depth + 1) for depth in range(k)])


def static_of(texts: Sequence[Text], tree: Sequence[Path]) -> list[Kept]:
    """Return for each text what a static tree gives, from a larger one."""
    have = {(), *tree}

    def depth(path: Path) -> int:
        return next(d for d in range(len(path), -1, -1) if path[:d] in have)

    return [{t: depth(path) for t, path in text.paths.items()} for text in texts]


def dynamic_of(texts: Sequence[Text], depth: int, nodes: int) -> list[Kept]:
    """Return for each text what a dynamic tree of at most so many levels and nodes gives, from
    a larger one of the same width."""

    def accepted(draft: RecordedDraft, agreed: Sequence[int]) -> int:
        assert draft.score is not None, "a dynamic tree comes with its scores"
        score, within = draft.score, (i for i, path in enumerate(draft.ranks) if len(path) <= depth)
        best = {*sorted(within, key=lambda i: -score[i])[:nodes]}
        return sum(node in best for node in agreed)

    return [{t: accepted(text.drafts[t], m) for t, m in text.agreed.items()} for text in texts]


# -- stepping through the texts


def walk(text: Text, kept: Kept, depth: int) -> list[tuple[int, bool]]:
    """Return the cycles of one text, as the engine would make them with a draft of at most
    `depth` levels: (accepted, clean). clean: neither a stop token nor the limit cut it."""
    cycles, t = [], 1
    while t < len(text.tokens):
        budget = min(text.limit - t - 1, depth)
        accepted = min(kept.get(t, 0), budget)
        clean = budget == depth and accepted + 1 <= len(text.tokens) - t
        cycles.append((accepted, clean))
        t += accepted + 1
    return cycles


def accepted_length(texts: Sequence[Text], kept: Sequence[Kept], depth: int) -> float:
    """Return tokens per clean cycle of all texts, the bonus token counted."""
    cycles = [one for pair in zip(texts, kept, strict=True) for one in walk(*pair, depth)]
    clean = [accepted + 1 for accepted, clean in cycles if clean]
    return sum(clean) / len(clean) if clean else 1.0
