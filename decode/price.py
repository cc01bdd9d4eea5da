"""What the growth of a draft must bring, and which nodes of it do: one rule for chains, drawn
trees and dynamic ones.

A node is worth its place in the target's pass when the chance that it is kept is above what
the place costs, and a level is worth drafting when the nodes that it would hang below are
likely enough between them. Both prices are counted in kept tokens: a cost in plain passes,
times the tokens that the time of a plain pass brings otherwise.

The chance that a node is kept is what the drafter itself says: the product of its distribution
along the path. A candidate that is drawn is judged before it is: by the mass that a draw from what
is left of the distribution has on average. So whether it is verified depends on what was drawn
before it, never on itself or on what follows (docs/lossless.md).

Shape letters: B rows, N nodes, P parents of one level, n candidates of one call, Vd draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.decode import waits
from outrider.decode.cost import FREE as FREE
from outrider.decode.cost import Price as Price
from outrider.decode.levels import Level
from outrider.decode.tree import DraftTree, TreeLayout, TreeShape


def awaited(left: Tensor) -> Tensor:
    """[..] mass that a token drawn from `left` [.., Vd], what is left of a distribution, has in it
    on average: where the distribution is right about one token that will come, the chance that the
    draw meets it."""
    total = left.sum(-1)
    return (left * left).sum(-1) / torch.where(total > 0, total, 1.0)


class Draws(Protocol):
    """What drawing a draft asks of its random numbers (decode.rng.Rng, Growth, an enumerator)."""

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...


class Knows(Protocol):
    """Of decode.grow.LevelSource what is asked here. It may have a word of its own about the next
    node of a chain, a method `chance` -> [B, 1] or None: that the node is kept, before it is
    drawn."""

    @property
    def device(self) -> torch.device: ...


class Growth:
    """Which nodes of a static shape pay, level by level. It stands in the place of the random
    numbers: a candidate is judged when it is about to be drawn, by what is left of its
    distribution.

    chance: [B, N] float32 that a node's whole path is kept. there: [B, N] bool, those that pay.
    place: [N] which of the parents of its level a node hangs below. is_chain: the draft is one
    before it is cut to a budget, which may be a neighbour's.
    """

    def __init__(
        self,
        price: Price,
        source: Knows,
        shape: TreeShape,
        budget: Tensor,
        rng: Draws,
        is_chain: bool,
    ) -> None:
        size, device = (len(budget), len(shape)), source.device
        self.price, self.source, self.rng = price, source, rng
        self.is_chain = is_chain
        self.chance = torch.zeros(size, device=device)
        self.there = torch.zeros(size, dtype=torch.bool, device=device)
        self.place = torch.zeros(len(shape), dtype=torch.int64, device=device)

    def enter(self, level: Level) -> bool:
        """Go on with a level. False: it is drafted for nobody, where asking is free."""
        self.place[level.number] = level.parent
        if not level.depth:
            self.above = self.chance.new_ones(len(self.chance), 1)
            self.open = torch.ones_like(self.above, dtype=torch.bool)
            return True
        self.above = self.chance[:, level.parents]
        paying = self.there[:, level.parents]
        worth = torch.where(paying, self.above, 0.0).sum(1, keepdim=True)
        self.open = paying & ~(worth < self.price.level)
        return not (waits.free(self.open) and not bool(self.open.any()))

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """See decode.rng.Rng: candidates of all rows, `node` [B * n] the same in each. One that
        does not pay is drawn at a number that counts for none."""
        left = weights.view(len(self.chance), -1, weights.shape[1])
        number = node[: left.shape[1]]
        word = self._word()
        address = self.ask(number, awaited(left) if word is None else word)
        place = self.rng.draft(weights, rows, address.reshape(-1))
        own = left.gather(2, place.view(*left.shape[:2], 1))[..., 0]
        self.tell(number, own if word is None else word)
        return place

    def point(self, logits: Tensor, place: Tensor, number: Tensor) -> None:
        """Judge candidates that are not drawn, the nodes `number` [n]: `place` [B, n] in the draft
        vocabulary, logits [B, P or 1, Vd] of the children of their parents."""
        word = self._word()
        if word is None:
            every = torch.arange(len(place), device=place.device)[:, None]
            parent = self.place[number] if logits.shape[1] > 1 else 0 * number
            log_total = logits.float().logsumexp(-1)
            word = (logits[every, parent, place].float() - log_total[:, parent]).exp()
        self.ask(number, word)
        self.tell(number, word)

    def _word(self) -> Tensor | None:
        chance = getattr(self.source, "chance", None)
        return chance() if self.is_chain and chance is not None else None

    def ask(self, number: Tensor, chance: Tensor) -> Tensor:
        """Whether the candidates `number` [n] pay, each the next one of its parent; chance: [B, n]
        of each given its parent, by what is known before it is drawn. Returns the numbers [B, n]
        at which they are drawn. What is NaN pays: the draft is refused for it later."""
        at = self.place[number]
        pays = self.open[:, at] & ~(self.above[:, at] * chance < self.price.node)
        self.open[:, at] = pays  # a younger sibling is drawn as if this one had been tried
        self.there[:, number] = pays
        return torch.where(pays, number, number + len(self.place))

    def tell(self, number: Tensor, chance: Tensor) -> None:
        """What candidates that were asked for turned out to be: their chance [B, n] given their
        parents, now that they are known."""
        path = self.above[:, self.place[number]] * chance
        self.chance[:, number] = path.to(self.chance.dtype)


def pruned(tree: DraftTree, there: Tensor) -> DraftTree:
    """`tree`, of a static shape, without the nodes that are not in `there` [B, N]. Of every node
    that is, its parent and its elder siblings are."""
    count, n = tree.tokens.shape
    slot, layout = torch.arange(n, device=tree.tokens.device), tree.layout
    there = there & (slot < tree.size[:, None])
    size, sampled, proposal = there.sum(1), tree.sampled, tree.proposal
    width = int(size.max()) if waits.free(size) else n
    if not width:
        return DraftTree.empty(count, there.device, sampled is not None)
    if waits.free(there) and bool(there.all()):
        return tree
    kept = (~there).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # old numbers
    used, number = slot[:width] < size[:, None], there.cumsum(1) - 1
    score = None if tree.score is None else tree.score.gather(1, kept)
    if sampled is not None and proposal is not None:
        sampled = sampled.gather(1, kept)
        proposal = replace(proposal, row=proposal.row.gather(1, kept))
    most = layout.children.shape[2]
    if most == 1:
        chain = DraftTree.chain(tree.tokens[:, :width], size, sampled, proposal)
        return replace(chain, score=score)
    above = tree.parents.gather(1, kept)
    parents = torch.where(used & (above >= 0), number.gather(1, above.clamp(min=0)), -1)
    depth = torch.where(used, layout.depth.expand(count, n).gather(1, kept), 0)
    own = TreeLayout.of(parents, depth, layout.levels, most, layout.room)
    tokens = tree.tokens.gather(1, kept)
    return DraftTree(tokens, parents, size, sampled, proposal, static_layout=own, score=score)
