"""The accept rule written a second time, one row and one number at a time, from the
papers' pseudo-code.
"""

from __future__ import annotations

from outrider.decode.rng import ACCEPT, RESIDUAL, Rng
from outrider.decode.sampling import Distribution
from outrider.decode.tree import DraftTree


class Row:
    """One row of a tree with plain lists; `u` reads the same addressed uniforms as the batched
    code.
    """

    def __init__(self, tree: DraftTree, distribution: Distribution, rng: Rng, row: int) -> None:
        import torch

        self.row, self.rng, self.torch = row, rng, torch
        self.tokens = tree.tokens[row, : int(tree.size[row])].tolist()
        self.kids: dict[int, list[int]] = {}
        for i, p in enumerate(tree.parents[row, : len(self.tokens)].tolist()):
            self.kids.setdefault(p, []).append(i)
        self.tree, self.distribution = tree, distribution

    def u(self, node: int, purpose: int) -> float:
        rows, nodes = self.torch.tensor([self.row]), self.torch.tensor([node])
        return float(self.rng.uniform(rows, nodes, purpose)[0])

    def p(self, node: int) -> list[float]:
        support = self.distribution.at(self.torch.tensor([self.row]), self.torch.tensor([node + 1]))
        return support.dense(self.distribution.vocab_size)[0].tolist()

    def q(self, node: int, earlier: list[int]) -> list[float]:
        """The proposal candidate `node` was drawn from, given its earlier siblings."""
        size = self.distribution.vocab_size
        proposal = self.tree.proposal
        assert proposal is not None and self.tree.sampled is not None
        if not bool(self.tree.sampled[self.row, node]):
            return [float(x == self.tokens[node]) for x in range(size)]
        distribution = [0.0] * size
        ids = range(size) if proposal.vocab is None else proposal.vocab.tolist()
        for x, mass in zip(
            ids, proposal.probs[self.row, int(proposal.row[self.row, node])].tolist(), strict=True
        ):
            distribution[x] = mass
        if not proposal.replacement:
            for e in earlier:
                distribution[self.tokens[e]] = 0.0
        total = sum(distribution)
        return [x / total for x in distribution]

    def pick(self, weights: list[float], node: int) -> int:
        ids = self.distribution.at(self.torch.tensor([self.row]), self.torch.tensor([node + 1])).ids
        order = range(len(weights)) if ids is None else ids[0].tolist()  # the support's own order
        goal, total = self.u(node, RESIDUAL) * sum(weights), 0.0
        for x in order:
            total += weights[x]
            if total > goal:
                return x
        return max(x for x, w in enumerate(weights) if w > 0)

    def traversal(self) -> tuple[list[int], int]:
        found = self._below(-1, 1.0)
        assert found is not None
        return found

    def _below(self, node: int, w: float) -> tuple[list[int], int] | None:
        m = self.p(node)
        for j, kid in enumerate(self.kids.get(node, [])):
            q, x = self.q(kid, self.kids[node][:j]), self.tokens[kid]
            deeper = self._below(kid, min(w * m[x] / q[x], 1.0))
            if deeper is not None:
                return [kid, *deeper[0]], deeper[1]
            rest = [max(w * a - b, 0.0) for a, b in zip(m, q, strict=True)]
            s = sum(rest)
            m = _norm(rest, m)
            w = s / (s + 1 - w) if s + 1 - w > 0 else 1.0
        if node == -1 or self.u(node, ACCEPT) < w:
            return [], self.pick(m, node)
        return None


def _norm(weights: list[float], fallback: list[float]) -> list[float]:
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else fallback
