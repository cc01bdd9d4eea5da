"""The accepted length a rule is expected to give on one scored draft: every coin averaged out,
none thrown.

The mean over drafts is that of the realised accepted length, with far less noise, and both
rules can be asked about the same draft. Shape letters: B rows, N nodes, R rows in hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode.rng import Rng
from decode.sampling import Law
from decode.tree import DraftTree
from decode.verify import Siblings, Verdict, children, traversal


def accepted(tree: DraftTree, law: Law, rule: str) -> Tensor:
    """[B] float64: expected number of accepted draft tokens of each row given its draft. rule:
    "rejection" or "traversal"; on deterministic trees both are the sum of the nodes' path
    probabilities."""
    if tree.sampled is None or tree.proposal is None or rule == "rejection":
        return _top_down(tree, law)
    return _leaf_to_root(tree, law)


def _top_down(tree: DraftTree, law: Law) -> Tensor:
    count, n = tree.tokens.shape
    reach = torch.zeros(count, n + 1, dtype=torch.float64)
    reach[:, 0] = 1
    depth = torch.cat(
        [tree.layout.depth.new_full((tree.layout.depth.shape[0], 1), -1), tree.layout.depth], 1
    )
    present = torch.arange(n + 1) <= tree.size[:, None]
    for level in range(tree.layout.levels):
        rows, slots = ((depth == level - 1) & present & (reach > 0)).nonzero(as_tuple=True)
        kids, there = children(tree, rows, slots)
        left = reach[rows, slots]
        if tree.sampled is None or tree.proposal is None:
            support = law.at(rows, slots)
            for j in range(kids.shape[1]):
                old = there[:, j]
                reach[rows[old], kids[old, j] + 1] = (
                    left * support.of(tree.tokens[rows, kids[:, j]]).double()
                )[old]
            continue
        siblings, certain = Siblings(tree, law, rows, slots, kids), torch.ones_like(left)
        for j in range(kids.shape[1]):
            old = there[:, j]
            chance = torch.where(old, siblings.chance(certain, j), 0.0)
            reach[rows[old], kids[old, j] + 1] = (left * chance)[old]
            left = left * (1 - chance)
            siblings.fail(certain, j, old)
    return reach[:, 1:].sum(1)


class _Listener(Rng):
    """Keeps the chances with which traversal ends at each slot."""

    chance: Tensor
    order: Tensor

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        self.chance, self.order = probability, node + 1
        return super().first(probability, rows, node)


def _leaf_to_root(tree: DraftTree, law: Law) -> Tensor:
    zero = torch.zeros(tree.tokens.shape[0], dtype=torch.int64)
    listener = _Listener(0, zero, zero)
    traversal(tree, law, listener)
    p = listener.chance.clamp(0, 1)
    before = torch.cat([torch.ones_like(p[:, :1]), (1 - p).cumprod(1)[:, :-1]], 1)
    depth = tree.positions().expand(len(p), -1).gather(1, listener.order)
    return (p * before * depth).sum(1)


class Watched:
    """A rule that verifies by `verify` and notes, per request, what each rule is expected to
    accept on the same draft.

    Cycles whose draft is shorter than `nodes` (the length limit) are left out. seen: request
    -> list of [rejection, traversal, realised].
    """

    def __init__(self, verify: Any, nodes: int, both: bool) -> None:
        self.verify, self.nodes, self.both = verify, nodes, both
        self.seen: dict[int, list[list[float]]] = {}

    def __call__(self, tree: DraftTree, law: Law, rng: Any) -> Verdict:
        verdict = self.verify(tree, law, rng)
        if not tree.width or not self.nodes:
            return verdict
        down = accepted(tree, law, "rejection")
        up = accepted(tree, law, "traversal") if self.both else down
        requests = rng._address[1].tolist()
        for b, full in enumerate((tree.size == self.nodes).tolist()):
            if full:
                row = [float(down[b]), float(up[b]), float(verdict.length[b])]
                self.seen.setdefault(requests[b], []).append(row)
        return verdict
