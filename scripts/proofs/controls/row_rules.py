"""What the wrong rules are written with: one row of a tree at a time, and correct top-down
rejection with places where one thing can be done wrongly.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.decode.sampling import Distribution
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict

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
        q = proposal.read(q, None, self.distribution.vocab_size)[0].clone()
        if not proposal.replacement:
            q[[self.tokens[i] for i in before]] = 0
        return q / q.sum()

    def accept(self, probability: float | Tensor, node: int) -> bool:
        p = torch.as_tensor(probability, dtype=torch.float64, device=self.device)
        return bool(self.rng.accept(p.reshape(1).clamp(0, 1), self.index, self.number(node)))

    def draw(self, weights: Tensor, slot: int) -> int:
        return int(self.rng.draw(weights[None], self.index, self.number(slot - 1)))


def by_row(rule: Callable[[TreeRow], Path]) -> Rule:
    """A rule for one row becomes a rule for a tree."""

    def verify(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        rows, levels = tree.tokens.shape[0], tree.layout.levels
        path = torch.full((rows, levels), -1, dtype=torch.int64)
        length, bonus = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        for b in range(rows):
            nodes, token = rule(TreeRow(tree, distribution, rng, b))
            path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
            length[b], bonus[b] = len(nodes), token
        device = distribution.logits.device
        return Verdict(path.to(device), length.to(device), bonus.to(device))

    verify.__name__ = rule.__name__
    return verify


def norm(weights: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if total > 0 else weights


def descend(
    row: TreeRow,
    p: Callable[[TreeRow, int], Tensor] = TreeRow.p,
    update: Callable[[Tensor, Tensor, TreeRow], Tensor] = lambda r, q, row: norm(
        (r - q).clamp(min=0)
    ),
    final: Callable[[TreeRow, int, Tensor, bool], Tensor] = lambda row, slot, r, rejected: r,
    q_of: Callable[[TreeRow, int, list[int]], Tensor] = TreeRow.q,
    end: Callable[[TreeRow, Tensor, int], int] = TreeRow.draw,  # type: ignore[assignment]
) -> Path:
    """Correct top-down rejection with places where one thing can be done wrongly."""
    slot = 0
    nodes: list[int] = []
    while True:
        r, hit = p(row, slot), -1
        before: list[int] = []
        for node in row.kids(slot):
            x, q = row.tokens[node], q_of(row, node, before)
            if row.accept(float(r[x] / q[x]) if q[x] > 0 else 0.0, node):
                hit = node
                break
            r, before = update(r, q, row), [*before, node]
        if hit < 0:
            weights = final(row, slot, r, bool(before))
            if not weights.sum() > 0:
                weights = p(row, slot)
            return nodes, end(row, weights, slot)
        nodes.append(hit)
        slot = hit + 1
