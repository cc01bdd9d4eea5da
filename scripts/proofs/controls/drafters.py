"""Known drafting mistakes: the tree is drawn as told, then something happens to it.
mangle(tree) -> tree.

scripts/proofs/controls/catalogue.py says where each was seen and which layer catches it.
Nothing outside the controls may import this file.

Shape letters: B rows, N nodes, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.decode.price import pruned
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree
from outrider.decode.wrapped import Adaptive


class Anticipating(Adaptive):
    """Adapts the draft length to the draft itself: a token less likely than the row's
    acceptance so far is dropped, and all behind it."""

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = self.inner.propose(budget, sampling, rng)
        if tree.width:
            rate = torch.from_numpy((self.hits / self.trials)[:, : tree.width])
            keep = (_own_q(tree) >= rate).long().cumprod(1).sum(1)
            tree = dataclasses.replace(tree, size=torch.minimum(tree.size, keep))
        self.proposed = tree.size.numpy()
        return tree


def _claimed(tree: DraftTree, distribution: Callable[[Tensor], Tensor]) -> DraftTree:
    if tree.proposal is None:
        return tree
    return dataclasses.replace(
        tree,
        proposal=dataclasses.replace(tree.proposal, probs=distribution(tree.proposal.probs)),
    )


def _claimed_at(tree: DraftTree, temperature: float) -> DraftTree:
    """Scored with the distribution that it was drawn from, at another temperature."""

    def tempered(distribution: Tensor) -> Tensor:
        weights = distribution.pow(1 / temperature)
        return weights / weights.sum(-1, keepdim=True)

    return _claimed(tree, tempered)


def scored_unwarped(tree: DraftTree) -> DraftTree:
    """Drawn from a warped distribution (temperature 0.5), scored with the distribution
    before warping. Over a large vocabulary the tail takes most of the claimed mass, likely tokens
    are always accepted, and little of the bias is left."""
    return _claimed_at(tree, 2.0)


def scored_sharpened(tree: DraftTree) -> DraftTree:
    """Drawn without the temperature of 0.5 that its score has: likely tokens are rejected too
    often, however large the vocabulary."""
    return _claimed_at(tree, 0.5)


def scored_in_bfloat16(tree: DraftTree) -> DraftTree:
    """Drawn from one distribution, scored with its bfloat16 rounding."""
    return _claimed(
        tree, lambda distribution: distribution.to(torch.bfloat16).to(distribution.dtype)
    )


def without_scored_as_with(tree: DraftTree) -> DraftTree:
    """Siblings drawn without replacement, scored with the unchanged distribution."""
    assert tree.proposal is not None
    return dataclasses.replace(tree, proposal=dataclasses.replace(tree.proposal, replacement=True))


def with_scored_as_without(tree: DraftTree) -> DraftTree:
    """Siblings drawn with replacement, scored as if earlier ones had been removed."""
    assert tree.proposal is not None
    return dataclasses.replace(tree, proposal=dataclasses.replace(tree.proposal, replacement=False))


def candidates_scored_softly(tree: DraftTree) -> DraftTree:
    """Deterministic candidates (top-k) scored with their softmax instead of a point mass."""
    return dataclasses.replace(tree, sampled=torch.ones_like(tree.tokens, dtype=torch.bool))


def drops_unlikely(tree: DraftTree) -> DraftTree:
    """Anticipates: a sampled token is not verified when its own q falls below 0.3 (chains)."""
    if tree.proposal is None or tree.sampled is None or tree.width == 0:
        return tree
    own = _own_q(tree)
    keep = ((own >= 0.3) | ~tree.sampled).long().cumprod(1).sum(1)
    return dataclasses.replace(tree, size=torch.minimum(tree.size, keep))


def reranks_siblings(tree: DraftTree) -> DraftTree:
    """Anticipates: sampled siblings are re-ordered by their own q (trees of one level)."""
    order = (-_own_q(tree)).argsort(dim=1, stable=True)
    return dataclasses.replace(tree, tokens=tree.tokens.gather(1, order))


def _own_q(tree: DraftTree) -> Tensor:
    """q(x) of every node's own token, [B, N]."""
    assert tree.proposal is not None
    rows, n = tree.tokens.shape
    distribution = tree.proposal.probs.gather(
        1, tree.proposal.row[:, :, None].expand(-1, -1, tree.proposal.probs.shape[2])
    )
    flat = tree.proposal.read(distribution.reshape(rows * n, -1), tree.tokens.reshape(-1, 1), 0)
    return flat.reshape(rows, n)


def drops_by_their_own_distribution(tree: DraftTree) -> DraftTree:
    """Anticipates: a drawn node of a tree makes no room where its own path is unlikely, and
    with it goes what hangs below it and behind it."""
    if tree.proposal is None or tree.sampled is None or tree.width == 0:
        return tree
    chance, there = _own_q(tree), torch.ones_like(tree.sampled)
    for node, above in enumerate(tree.parents[0].tolist()):
        elder = [i for i in range(node) if tree.parents[0, i] == above]
        if above >= 0:
            chance[:, node] *= chance[:, above]
        need = [above] * (above >= 0) + elder[-1:]
        there[:, node] = (chance[:, node] >= 0.2) & there[:, need].all(1)
    return pruned(tree, there)
