"""Verification rules that are wrong, each small and explicit, which tests of losslessness must
find, and what goes wrong around a rule.

All were shipped or published somewhere. A rule here has the same call as decode.verify's:
rule(tree, distribution, rng) -> Verdict; it works row by row, for reading.

Shape letters: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decode.cache import TreeCache
from outrider.decode.sampling import Distribution
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict, verify

Rule = Callable[[DraftTree, Distribution, Coins], Verdict]
Path = tuple[list[int], int]  # accepted nodes, bonus token


class TreeRow:
    """One row of a tree, its distributions and coins. Slot 0 follows the last committed token."""

    def __init__(self, tree: DraftTree, distribution: Distribution, rng: Coins, row: int) -> None:
        self.distribution, self.rng, self.size = distribution, rng, int(tree.size[row])
        self.tokens: list[int] = tree.tokens[row].tolist()
        self.parents: list[int] = tree.parents[row].tolist()
        self.tree, self.row = tree, row
        self.device = distribution.logits.device
        self.index = self.number(row)

    def number(self, value: int) -> Tensor:
        """[1] int64 where the distributions lie."""
        return torch.tensor([value], device=self.device)

    def kids(self, slot: int) -> list[int]:
        return [i for i in range(self.size) if self.parents[i] == slot - 1]

    def p(self, slot: int) -> Tensor:
        """The target's distribution [V] float64 at a slot."""
        support = self.distribution.at(self.index, self.number(slot))
        return support.dense(self.distribution.vocab_size)[0].to(torch.float64)

    def raw(self, slot: int) -> Tensor:
        """softmax of the logits before any temperature or truncation, [V] float64."""
        return self.distribution.logits[self.row, slot].to(torch.float64).softmax(-1)

    def sampled(self, node: int) -> bool:
        return self.tree.sampled is not None and bool(self.tree.sampled[self.row, node])

    def q(self, node: int, before: list[int]) -> Tensor:
        """The distribution [V] that `node` was drawn from, without the siblings that are
        removed."""
        if not self.sampled(node):
            token = self.number(self.tokens[node])[0]
            return torch.nn.functional.one_hot(token, self.distribution.vocab_size).double()
        proposal = self.tree.proposal
        assert proposal is not None
        q = proposal.probs[self.row, proposal.row[self.row, node]].to(torch.float64)[None]
        every = torch.arange(self.distribution.vocab_size, device=q.device)
        q = proposal.read(q, every[None])[0]
        if not proposal.replacement:
            q[[self.tokens[i] for i in before]] = 0
        return q / q.sum()

    def accept(self, probability: float | Tensor, node: int) -> bool:
        p = torch.as_tensor(probability, dtype=torch.float64, device=self.device)
        tests = torch.stack([p.reshape(1).clamp(0, 1), torch.ones_like(p).reshape(1)], 1)
        return int(self.rng.first(tests, self.index, self.number(node).expand(1, 2))) == 0

    def draw(self, weights: Tensor, slot: int) -> int:
        return int(self.rng.draw(weights[None], self.index, self.number(slot - 1)))


def by_row(rule: Callable[[TreeRow], Path]) -> Rule:
    """A rule for one row becomes a rule for a tree."""

    def wrong(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        rows, levels = tree.tokens.shape[0], tree.layout.levels
        path = torch.full((rows, levels), -1, dtype=torch.int64)
        length, bonus = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        for b in range(rows):
            nodes, token = rule(TreeRow(tree, distribution, rng, b))
            path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
            length[b], bonus[b] = len(nodes), token
        device = distribution.logits.device
        return Verdict(path.to(device), length.to(device), bonus.to(device))

    return wrong


def norm(weights: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if total > 0 else weights


def descend(
    row: TreeRow,
    update: Callable[[Tensor, Tensor, TreeRow], Tensor] = lambda r, q, row: norm(
        (r - q).clamp(min=0)
    ),
    final: Callable[[TreeRow, int, Tensor, bool], Tensor] = lambda row, slot, r, rejected: r,
) -> Path:
    """Correct top-down rejection with places where one thing can be done wrongly."""
    slot = 0
    nodes: list[int] = []
    while True:
        r, hit = row.p(slot), -1
        before: list[int] = []
        for node in row.kids(slot):
            x, q = row.tokens[node], row.q(node, before)
            if row.accept(float(r[x] / q[x]) if q[x] > 0 else 0.0, node):
                hit = node
                break
            r, before = update(r, q, row), [*before, node]
        if hit < 0:
            weights = final(row, slot, r, bool(before))
            if not weights.sum() > 0:
                weights = row.p(slot)
            return nodes, row.draw(weights, slot)
        nodes.append(hit)
        slot = hit + 1


@by_row
def typical_acceptance(row: TreeRow) -> Path:
    """Medusa: keep x iff p(x) > min(0.09, 0.3 exp(-H(p))), take the longest kept path."""

    def kept(slot: int) -> list[list[int]]:
        kids = row.kids(slot)
        if not kids:
            return [[]]
        p = row.p(slot)
        entropy = -(p * p.clamp(min=1e-300).log()).sum()
        edge = min(0.09, 0.3 * float((-entropy).exp()))
        return [[], *([k, *rest] for k in kids if p[row.tokens[k]] > edge for rest in kept(k + 1))]

    nodes = max(kept(0), key=len)
    end = nodes[-1] + 1 if nodes else 0
    return nodes, row.draw(row.p(end), end)


@by_row
def rejected_token_stays(row: TreeRow) -> Path:
    """The token after a rejection is drawn from the whole distribution, the rejected token
    included."""
    return descend(row, update=lambda r, q, _: r)


@by_row
def bonus_unwarped(row: TreeRow) -> Path:
    """The bonus token of a whole draft comes from the distribution before temperature and
    truncation."""
    return descend(
        row, final=lambda row, slot, r, rejected: r if rejected or not slot else row.raw(slot)
    )


@by_row
def softmax_acceptance(row: TreeRow) -> Path:
    """litgpt at T = 0: accepts the argmax with its softmax probability, else the next best."""
    slot = 0
    nodes: list[int] = []
    while True:
        r = row.raw(slot)
        hit = -1
        for node in row.kids(slot)[:1]:
            if row.accept(r[row.tokens[node]], node):
                hit = node
            else:
                r[row.tokens[node]] = 0
        if hit < 0:
            return nodes, int(r.argmax())
        nodes.append(hit)
        slot = hit + 1


@by_row
def greedy_fallback(row: TreeRow) -> Path:
    """SGLang on CPU and XPU: temperature above 0 is taken for 0, the best token alone is kept."""
    nodes: list[int] = []
    slot = 0
    while True:
        best = int(row.p(slot).argmax())
        hit = [node for node in row.kids(slot) if row.tokens[node] == best]
        if not hit:
            return nodes, best
        nodes.append(hit[0])
        slot = hit[0] + 1


@by_row
def bonus_from_the_draft(row: TreeRow) -> Path:
    """Behind a whole draft the token comes from the distribution of the draft's last step."""
    return descend(
        row,
        final=lambda row, slot, r, rejected: row.q(slot - 1, []) if slot and not rejected else r,
    )


# --- around a rule


def rows_mixed_up(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """1Cat-vLLM #656: with more than two rows every row reads its neighbour's logits."""
    if len(tree.tokens) > 2:
        distribution.logits = distribution.logits.roll(1, 0)
    return verify(tree, distribution, rng)


def without_scored_as_with(tree: DraftTree) -> DraftTree:
    """SpecInfer on RSD trees: siblings drawn without replacement, scored as if with it."""
    assert tree.proposal is not None
    return dataclasses.replace(tree, proposal=dataclasses.replace(tree.proposal, replacement=True))


def commits_wrong_rows(target: Target) -> Target:
    """A target whose cache keeps the first node's keys and values for every accepted node."""
    wrong = copy.copy(target)

    def new_cache(*args: Any, **kwargs: Any) -> Any:
        cache = target.new_cache(*args, **kwargs)
        commit = cache.commit
        cache.commit = lambda path, length: commit(path.clamp(max=0), length)  # type: ignore[method-assign]
        return cache

    wrong.new_cache = new_cache  # type: ignore[method-assign]
    return wrong


def leaks_siblings(target: Target) -> Target:
    """A target whose attention mask lets a node see every earlier node, not only its
    ancestors. Verification reads the tree as it is."""
    wrong = copy.copy(target)

    def score(cache: TreeCache, last: Tensor, tree: DraftTree, taps: Sequence[int] = ()) -> Step:
        layout = dataclasses.replace(tree.layout)
        layout.__dict__["mask"] = torch.ones_like(tree.layout.mask).tril()
        return target.score(cache, last, dataclasses.replace(tree, static_layout=layout), taps)

    wrong.score = score  # type: ignore[method-assign]
    return wrong
