"""Growing a draft with an autoregressive drafter: a chain, a dynamic tree (EAGLE-2), or a
static tree sampled without replacement. What reads a token and what remembers it is the
drafter's own (`Steps`).

Drafted tokens are numbered in the order in which they are read, over all levels of a cycle;
the drafter keeps them behind its committed tokens and forgets them with the cycle.

Shape letters: B live rows, D width of a state, Vd draft vocabulary, W tokens read together, N
nodes, M candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.rng import Rng
from decode.sampling import Sampling
from decode.tree import DraftTree, Layout, Proposal, TreeShape


@dataclass(frozen=True)
class Form:
    """What a draft looks like, settled before a drafter is made.

    shape: "chain" or "tree". depth: levels. nodes: of a tree, at most. static: the nodes of a
    chain or of a static tree; None: a dynamic one at any temperature. width: nodes that a
    dynamic tree expands per level, 0 for drafters that have none. drawn: where T > 0 a tree's
    candidates are drawn, siblings without replacement (a chain's are in any case).
    """

    shape: str
    depth: int
    nodes: int
    static: TreeShape | None
    width: int = 0
    drawn: bool = True

    @staticmethod
    def chain(depth: int) -> Form:
        """A chain of `depth` levels."""
        return Form("chain", depth, depth, TreeShape.chain(depth))

    @staticmethod
    def tree(depth: int, nodes: int = 24, width: int = 4, static: TreeShape | None = None) -> Form:
        """A dynamic tree; where T > 0 `static` in its place, drawn."""
        most = max(nodes, len(static or ()))
        return Form("tree", depth, most, static, width, static is not None)


class Steps(Protocol):
    """state: [B, D], what the next token after the committed ones is predicted from."""

    device: torch.device
    state: Tensor

    def draft_ids(self) -> Tensor | None:
        """[Vd] int64 ascending target ids of the draft vocabulary, None for the whole one."""

    def logits(self, state: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        ...

    def extend(self, tokens: Tensor, above: Tensor, seen: Tensor | None, level: int) -> Tensor:
        """Read W drafted tokens [B, W] that follow the states `above` [B, W, D]: their states
        [B, W, D].

        seen: [B, W, R] bool, which of the R tokens read in this cycle (these W last) each may
            look at; None: all, W is
        1. level: 1 for children of the last committed token.
        """
        ...


def chain(steps: Steps, levels: int, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
    """T = 0: the most probable token; T > 0: drawn from the drafter's own law under the
    target's settings.
    """
    state, ids = steps.state, steps.draft_ids()
    rows = state.shape[0]
    every = torch.arange(rows, device=steps.device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for level in range(levels):
        logits = steps.logits(state)
        if sampling.greedy:
            place = logits.argmax(-1)
        else:
            laws.append(sampling.draft_law(logits))
            place = rng.draft(laws[-1], every, torch.full_like(every, level))
        tokens.append(place if ids is None else ids[place])
        if level + 1 < levels:
            state = steps.extend(tokens[-1][:, None], state[:, None], None, level + 1)[:, 0]
    drafted, size = torch.stack(tokens, 1), budget.clamp(0, levels)
    if sampling.greedy:
        return DraftTree.chain(drafted, size)
    row = torch.arange(levels, device=steps.device).expand(rows, levels)
    return DraftTree.chain(
        drafted,
        size,
        torch.ones_like(drafted, dtype=torch.bool),
        Proposal(torch.stack(laws, 1), row, ids),
    )


def dynamic(steps: Steps, levels: int, budget: Tensor, width: int, nodes: int) -> DraftTree:
    """EAGLE-2 (Li et al. 2406.16858): expand the `width` best nodes of every level by
    cumulative log-probability, then keep the `nodes` best candidates of all levels. Candidates
    are the most probable tokens, so each is a point mass."""
    device, ids = steps.device, steps.draft_ids()
    count = steps.state.shape[0]
    score, place = torch.log_softmax(steps.logits(steps.state).float(), -1).topk(
        width, -1
    )  # [B, W]
    scores, tokens = [score], [place if ids is None else ids[place]]
    origins = [torch.full_like(place, -1)]
    beam = torch.arange(width, device=device).expand(count, width)
    above = steps.state[:, None].expand(-1, width, -1)
    ancestors = torch.zeros(count, width, 0, dtype=torch.bool, device=device)
    own = torch.eye(width, dtype=torch.bool, device=device).expand(count, width, width)
    start = 0
    for level in range(1, levels):
        # The beam: W candidates of the last level, `beam` their numbers in it, `above` the
        # states they follow.
        ancestors = torch.cat([ancestors, own], 2)
        token, total = tokens[-1].gather(1, beam), scores[-1].gather(1, beam)
        state = steps.extend(token, above, ancestors, level)
        score, place = torch.log_softmax(steps.logits(state).float(), -1).topk(
            width, -1
        )  # [B, W, W]
        scores.append((total[..., None] + score).flatten(1))
        tokens.append((place if ids is None else ids[place]).flatten(1))
        origins.append((start + beam).repeat_interleave(width, 1))
        start += scores[-2].shape[1]
        if level + 1 < levels:
            beam = scores[-1].topk(width, -1).indices
            up = beam // width
            above = state.gather(1, up[..., None].expand(-1, -1, state.shape[-1]))
            ancestors = ancestors.gather(1, up[..., None].expand(-1, -1, ancestors.shape[2]))
    depth = torch.tensor(
        [0] * width + [d for d in range(1, levels) for _ in range(width**2)], device=device
    )
    return rerank(
        torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(origins, 1), depth, budget, nodes
    )


def rerank(
    score: Tensor, token: Tensor, origin: Tensor, level: Tensor, budget: Tensor, nodes: int
) -> DraftTree:
    """The `nodes` best of M candidates [B, M] that stand level by level (`level` [M]). origin:
    number of the candidate above, -1 for the root; a candidate is never better than its
    origin, and the sort is stable, so parents stay in and in front. Candidates below budget
    [B] levels are left out."""
    count, total = score.shape
    nodes = min(nodes, total)
    score = score.masked_fill(level >= budget[:, None], -torch.inf)
    best = score.sort(dim=1, descending=True, stable=True)
    size = (best.values[:, :nodes] > -torch.inf).sum(1)
    node = torch.arange(nodes, device=score.device)
    chosen = torch.where(node < size[:, None], best.indices[:, :nodes], total + node).sort(1).values
    used = chosen < total
    chosen = torch.where(used, chosen, 0)
    where = score.new_full((count, total + 1), -1, dtype=torch.int64)
    where.scatter_(1, torch.where(used, chosen, total), node.expand(count, nodes))
    above = origin.gather(1, chosen)
    parents = torch.where(used & (above >= 0), where.gather(1, above.clamp(min=0)), -1)
    layout = tree_layout(parents, torch.where(used, level[chosen], 0), int(level[-1]) + 1)
    return DraftTree(
        token.gather(1, chosen), parents, size, static_layout=layout, score=score.gather(1, chosen)
    )


def sampled(
    steps: Steps, shape: TreeShape, levels: int, budget: Tensor, sampling: Sampling, rng: Rng
) -> DraftTree:
    """A static tree whose siblings are drawn one after the other from the drafter's law,
    without replacement; which nodes exist does not depend on what was drawn. Where a law has
    run out of tokens the next best one stands in as a deterministic candidate."""
    device, ids = steps.device, steps.draft_ids()
    count = steps.state.shape[0]
    shape = TreeShape(tuple(p for p in shape.paths if len(p) <= levels))
    layout = shape.layout(device)
    tokens = torch.zeros(count, len(shape), dtype=torch.int64, device=device)
    drawn = torch.ones(count, len(shape), dtype=torch.bool, device=device)
    laws: list[Tensor] = []  # by level
    law_row = torch.zeros(len(shape), dtype=torch.int64)
    kids = [[i for i in row if i >= 0] for row in layout.children[0].tolist()]  # by slot
    read: list[int] = []  # nodes read so far
    states = {0: steps.state}
    for level in range(shape.depth):
        parents = [0] if level == 0 else [i + 1 for i in shape.level(level - 1) if kids[i + 1]]
        if level:
            nodes = [slot - 1 for slot in parents]
            read += nodes
            above = torch.stack([states[int(layout.parents[0, i]) + 1] for i in nodes], 1)
            slots = torch.tensor(read, device=device) + 1
            seen = layout.mask[0][torch.tensor(parents, device=device)][:, slots].expand(
                count, -1, -1
            )
            state = steps.extend(tokens[:, nodes], above, seen, level)
            states |= {slot: state[:, j] for j, slot in enumerate(parents)}
        else:
            state = steps.state[:, None]
        logits = steps.logits(state)
        law = sampling.draft_law(logits.flatten(0, 1)).view(logits.shape)
        nodes, place, fresh = siblings(law, logits, [kids[slot] for slot in parents], rng)
        tokens[:, nodes], drawn[:, nodes] = (place if ids is None else ids[place]), fresh
        for row, slot in enumerate(parents, start=sum(one.shape[1] for one in laws)):
            law_row[kids[slot]] = row
        laws.append(law)
    proposal = Proposal(torch.cat(laws, 1), law_row.to(device).expand(count, -1), ids)
    return DraftTree.static(shape, tokens, shape.size_at(budget), drawn, proposal)


def siblings(
    law: Tensor, logits: Tensor, kids: Sequence[Sequence[int]], rng: Rng
) -> tuple[list[int], Tensor, Tensor]:
    """Draw the children of P parents, the elder ones of all parents first, without replacement
    among siblings.

    law, logits: [B, P, Vd] of the parents' children. kids: for each parent the numbers of its
    children in draw order, which address the random numbers. Returns the numbers of all
    children, their places in the draft vocabulary [B, K] int64 and [B, K] bool, false where
    the law had no token left and the best remaining logit was taken.
    """
    count, width = law.shape[0], law.shape[2]
    order = sorted(
        range(len(kids)), key=lambda j: -len(kids[j])
    )  # so that those with more children stand in front
    left, every = law[:, order], torch.arange(count, device=law.device)  # a copy
    nodes: list[int] = []
    places: list[Tensor] = []
    fresh: list[Tensor] = []
    for rank in range(len(kids[order[0]])):
        who = [j for j in order if len(kids[j]) > rank]
        numbers, some = [kids[j][rank] for j in who], left[:, : len(who)]
        address = torch.tensor(numbers, device=law.device).repeat(count)
        place = rng.draft(some.reshape(-1, width), every.repeat_interleave(len(who)), address).view(
            count, -1
        )
        # A law without mass gives some place without. One of NaN counts as drawn from: then
        # the tree is refused.
        there = ~(some.gather(2, place[..., None])[..., 0] <= 0)
        if law.device.type != "cpu" or not bool(there.all()):
            spare = logits[:, who].float()
            for old in places:
                spare.scatter_(2, old[:, : len(who), None], -torch.inf)
            place = torch.where(there, place, spare.argmax(-1))
        some.scatter_(2, place[..., None], 0.0)
        nodes += numbers
        places.append(place)
        fresh.append(there)
    return nodes, torch.cat(places, 1), torch.cat(fresh, 1)


def tree_layout(parents: Tensor, depth: Tensor, levels: int) -> Layout:
    """Layout of a dynamic tree whose depths [B, N] are known: a few operations per level,
    where Layout.of takes some per node."""
    count, n = parents.shape
    slot = torch.arange(n + 1, device=parents.device)
    up = torch.cat([parents.new_zeros(count, 1), parents + 1], 1)
    own = torch.eye(n + 1, dtype=torch.bool, device=parents.device)
    mask = own.expand(count, n + 1, n + 1)
    for _ in range(levels):
        mask = own | mask.gather(1, up[..., None].expand(-1, -1, n + 1))
    sibling = (parents[:, :, None] == parents[:, None, :]) & (slot[:n, None] > slot[None, :n])
    rank = sibling.sum(-1)
    width = int(rank.max()) + 1 if n else 0
    children = torch.full((count, n + 1, width), -1, dtype=torch.int64, device=parents.device)
    rows = torch.arange(count, device=parents.device)[:, None].expand(count, n)
    children[rows, parents + 1, rank] = slot[:n].expand(count, n)
    return Layout(parents, depth, mask, children, rank, levels)
