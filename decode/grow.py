"""Drawing a draft, level by level: the one loop behind every chain and every static tree, and
the dynamic tree (EAGLE-2). What is known of the next token is the drafter's own (`Source`).

Where T > 0 a chain's tokens are drawn from the drafter's own law under the target's settings,
and so are those of a tree, siblings one after the other without replacement. Else the most
probable tokens are taken, each a point mass. Which nodes exist does not depend on what was
drawn; where growing has a price (decode.price), on nothing that was drawn later.

Shape letters: B live rows, P parents, Vd draft vocabulary, W width of a level, N nodes, M
candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from decode import waits
from decode.price import FREE, Growth, Price, awaited
from decode.rng import Rng
from decode.sampling import Sampling
from decode.tree import DraftTree, Layout, Proposal, TreeShape


@dataclass(frozen=True)
class Form:
    """What a draft looks like, settled before a drafter is made.

    shape: "chain" or "tree". depth: levels. nodes: of a tree, at most. static: the nodes of a
    chain or of a static tree; None: a dynamic one at any temperature. width: nodes that a
    dynamic tree expands per level, 0 for drafters that have none. drawn: where T > 0 a tree's
    candidates are drawn, siblings without replacement (a chain's are in any case). price: what
    a node and a level must bring.
    """

    shape: str
    depth: int
    nodes: int
    static: TreeShape | None
    width: int = 0
    drawn: bool = True
    price: Price = FREE

    @staticmethod
    def chain(depth: int, price: Price = FREE) -> Form:
        """A chain of `depth` levels."""
        return Form("chain", depth, depth, TreeShape.chain(depth), price=price)

    @staticmethod
    def tree(
        depth: int,
        nodes: int = 24,
        width: int = 4,
        static: TreeShape | None = None,
        price: Price = FREE,
    ) -> Form:
        """A dynamic tree; where T > 0 `static` in its place, drawn."""
        most = max(nodes, len(static or ()))
        return Form("tree", depth, most, static, width, static is not None, price)


@dataclass(frozen=True)
class Nodes:
    """P drafted nodes of one level, whose children come next.

    level: theirs, 1 for children of the last committed token. tokens: [B, P] int64 target ids.
    above: [P] or [B, P] int64, which of the nodes of the call before (of level 1: of the one
    committed token) each hangs below; None: the one at its own place. seen: [B, P, R] bool,
    which of the R nodes of all calls so far, these P last, each is or hangs below; None: all of
    them, in a chain.
    """

    level: int
    tokens: Tensor
    above: Tensor | None
    seen: Tensor | None

    def of_parents(self, values: Tensor) -> Tensor:
        """What the nodes of the call before had, [B, P', ..], at their children: [B, P, ..]."""
        if self.above is None:
            return values
        if self.above.dim() == 1:
            return values[:, self.above]
        rows = torch.arange(values.shape[0], device=values.device)
        return values[rows[:, None], self.above]


class Source(Protocol):
    """What a drafter knows of the next token."""

    @property
    def device(self) -> torch.device: ...

    def draft_ids(self) -> Tensor | None:
        """[Vd] int64 ascending target ids of the draft vocabulary, None for the whole one."""

    def open(self, levels: int) -> Tensor:
        """Begin a draft of at most so many levels: logits [B, 1, Vd] of the token after the
        last committed one."""
        ...

    def level(self, nodes: Nodes) -> Tensor:
        """Logits [B, P, Vd] of the children of P nodes, or [B, 1, Vd] where they all have the
        same."""
        ...

    def chance(self) -> Tensor | None:
        """[B, 1] that the next node of a chain is kept, by a word of the drafter's own and before
        the node is drawn; None: it has only its law."""
        ...


def draft(source: Source, form: Form, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
    """A draft of `form` for every row, at most budget [B] levels deep (on the host)."""
    levels = min(form.depth, int(budget.max())) if budget.numel() else 0
    if levels <= 0:
        return DraftTree.empty(budget.numel(), source.device)
    drawn = not sampling.greedy and (form.drawn or form.shape == "chain")
    if form.static is None or (form.width and not drawn):
        return dynamic(source, levels, budget, form.width, form.nodes, form.price)
    shape = form.static.cut(levels)
    return static(source, shape, budget, sampling if drawn else None, rng, form.price)


def static(
    source: Source,
    shape: TreeShape,
    budget: Tensor,
    sampling: Sampling | None,
    rng: Rng,
    price: Price = FREE,
) -> DraftTree:
    """Chains and static trees. sampling: what is drawn under, None: nothing is, the children
    of a node are its most probable tokens. Where a law has run out of tokens the next best one
    stands in as a deterministic candidate. price: nodes of the shape that do not pay are left
    out."""
    ids = source.draft_ids()
    count, device = budget.shape[0], source.device
    tokens = torch.empty(count, len(shape), dtype=torch.int64, device=device)
    drawn = torch.ones(count, len(shape), dtype=torch.bool, device=device)
    growth = None if price.nothing else Growth(price, count, len(shape), device)
    chain = len(shape) == shape.depth
    laws: list[Tensor] = []
    for level in _levels(shape, device):
        if growth and not growth.enter(level.parents if level.depth else None):
            shape = shape.cut(level.depth)
            break
        if level.depth:
            seen = None if level.seen is None else level.seen.expand(count, -1, -1)
            parents = Nodes(level.depth, tokens[:, level.parents], level.above, seen)
            logits = source.level(parents)
        else:
            logits = source.open(shape.depth)
        word = source.chance() if growth and chain else None
        nodes: slice | Tensor = level.nodes
        if sampling is None:
            place = _best(logits, level)
            if growth:
                own = _own(logits, place, level) if word is None else word
                growth.ask(level.number, level.parent, own)
                growth.tell(level.number, level.parent, own)
        else:
            laws.append(sampling.draft_law(logits.flatten(0, 1)).view(logits.shape))
            wide = (count, len(level.kids), logits.shape[2])
            law = laws[-1].expand(wide)
            if level.width == 1:
                place = _drawn(law, level, rng, growth, word)
            else:
                kids, raw = level.kids, logits.expand(wide)
                nodes, place, fresh = siblings(law, raw, kids, rng, growth)
                drawn[:, nodes] = fresh
        tokens[:, nodes] = place if ids is None else ids[place]
    size, width = shape.size_at(budget), len(shape)
    tokens = tokens[:, :width]
    if sampling is None:
        tree = DraftTree.static(shape, tokens, size)
    else:
        law = torch.cat(laws, 1)
        row = _law_rows(shape, device)[int(law.shape[1] > shape.depth)].expand(count, -1)
        tree = DraftTree.static(shape, tokens, size, drawn[:, :width], Proposal(law, row, ids))
    return tree if growth is None else pruned(tree, growth.there[:, :width], shape)


def _best(logits: Tensor, level: _Level) -> Tensor:
    """[B, n] places of the most probable children of P parents: logits [B, P or 1, Vd]."""
    if level.width == 1:
        return logits.argmax(-1).expand(-1, len(level.kids))
    best = logits.topk(level.width, -1).indices.expand(-1, len(level.kids), -1)
    return best[:, level.parent, level.rank]


def _own(logits: Tensor, place: Tensor, level: _Level) -> Tensor:
    """[B, n] probabilities of the children at `place` [B, n]: logits [B, P or 1, Vd]."""
    every = torch.arange(len(place), device=place.device)[:, None]
    parent = level.parent if logits.shape[1] > 1 else torch.zeros_like(level.parent)
    total = logits.float().logsumexp(-1)
    return (logits[every, parent, place].float() - total[:, parent]).exp()


def _drawn(
    law: Tensor, level: _Level, rng: Rng, growth: Growth | None, word: Tensor | None
) -> Tensor:
    """[B, P] places drawn for parents with one child each: law [B, P, Vd]."""
    count, parents, width = law.shape
    row = torch.arange(count, device=law.device).repeat_interleave(parents)
    address = level.number.expand(count, -1)
    if growth:
        address = growth.ask(level.number, level.parent, awaited(law) if word is None else word)
    place = rng.draft(law.reshape(-1, width), row, address.reshape(-1)).view(count, parents)
    if growth:
        own = law.gather(2, place[..., None])[..., 0] if word is None else word
        growth.tell(level.number, level.parent, own)
    return place


@dataclass(frozen=True)
class _Level:
    """How the nodes of one level of a static shape hang below those of the level before that
    have children, the P parents (the committed token alone at depth 0).

    nodes, number: theirs, [n]. width: most children of one. kids: the children of each parent
    in draw order. parent, rank: [n] int64 place of a node's parent among the parents, and its
    own among its siblings. parents: [P] their node numbers. above, seen: as in `Nodes`.
    """

    depth: int
    nodes: slice
    number: Tensor
    width: int
    kids: tuple[tuple[int, ...], ...]
    parent: Tensor
    rank: Tensor
    parents: slice | Tensor
    above: Tensor | None
    seen: Tensor | None


@functools.lru_cache(maxsize=256)
def _levels(shape: TreeShape, device: torch.device) -> tuple[_Level, ...]:
    number = {path: i for i, path in enumerate(shape.paths)}
    before: list[tuple[int, ...]] = [()]  # parents of the level before
    read: list[int] = []  # nodes that were parents so far
    found = []
    for depth in range(shape.depth):
        nodes = shape.level(depth)
        paths = [shape.paths[i] for i in nodes]
        parents = list(dict.fromkeys(path[:-1] for path in paths))
        kids = [tuple(i for i in nodes if shape.paths[i][:-1] == parent) for parent in parents]
        numbers = [number[parent] for parent in parents] if depth else []
        read += numbers
        seen = None
        if depth and shape != TreeShape.chain(len(shape)):
            mask = shape.layout(device).mask[:, 1:, 1:]
            seen = mask[:, numbers][:, :, read]
        above = [before.index(path[:-1]) for path in parents] if depth else [0]
        same = above == list(range(len(before)))
        found.append(
            _Level(
                depth=depth,
                nodes=slice(nodes.start, nodes.stop),
                number=torch.tensor(nodes, device=device),
                width=max(map(len, kids)),
                kids=tuple(kids),
                parent=torch.tensor([parents.index(path[:-1]) for path in paths], device=device),
                rank=torch.tensor([path[-1] for path in paths], device=device),
                parents=_indices(numbers, device),
                above=None if same else torch.tensor(above, device=device),
                seen=seen,
            )
        )
        before = parents if depth else [()]
    return tuple(found)


def _indices(numbers: list[int], device: torch.device) -> slice | Tensor:
    """Neighbours as a slice, which costs no gathering."""
    first = numbers[0] if numbers else 0
    if numbers == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers, device=device)


@functools.lru_cache(maxsize=256)
def _law_rows(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N] int64: the law that each node is drawn from, where a level has one, and where every
    parent has its own."""
    parents = list(dict.fromkeys(path[:-1] for path in shape.paths))
    return (
        torch.tensor([len(path) - 1 for path in shape.paths], device=device),
        torch.tensor([parents.index(path[:-1]) for path in shape.paths], device=device),
    )


def dynamic(
    source: Source, levels: int, budget: Tensor, width: int, nodes: int, price: Price = FREE
) -> DraftTree:
    """EAGLE-2 (Li et al. 2406.16858): expand the `width` best nodes of every level by
    cumulative log-probability, then keep the `nodes` best candidates of all levels. Candidates
    are the most probable tokens, each a point mass. The best lie in `nodes` levels of `nodes`.
    price: candidates that do not pay are left out, and a row whose next level does not pay
    grows no further."""
    levels, device, ids = min(levels, nodes), source.device, source.draft_ids()
    logits = source.open(levels)
    count, width = logits.shape[0], min(width, nodes, logits.shape[2])
    score, place = torch.log_softmax(logits[:, 0].float(), -1).topk(width, -1)  # [B, W]
    scores, tokens = [score], [place if ids is None else ids[place]]
    origins, depths = [torch.full_like(place, -1)], [0] * width
    beam = torch.arange(width, device=device).expand(count, width)
    above = torch.zeros(width, dtype=torch.int64, device=device)
    ancestors = torch.zeros(count, width, 0, dtype=torch.bool, device=device)
    growing = torch.ones(count, 1, dtype=torch.bool, device=device)
    start = 0
    for level in range(1, levels):
        # The beam: W candidates of the last level, the best in front, `beam` their numbers in
        # it, `above` which of the beam before they hang below.
        total, wide = scores[-1].gather(1, beam), width
        if not price.nothing:
            growing, wide = price.expanded(total, growing)
            if not wide:
                levels = level
                break
            beam, total, above = beam[:, :wide], total[:, :wide], above[..., :wide]
        own = torch.eye(wide, dtype=torch.bool, device=device).expand(count, wide, wide)
        ancestors = torch.cat([ancestors[:, :wide], own], 2)
        logits = source.level(Nodes(level, tokens[-1].gather(1, beam), above, ancestors))
        found = torch.log_softmax(logits.float(), -1).topk(width, -1)
        score, place = (t.expand(-1, wide, -1) for t in found)  # [B, W, children]
        score = (total[..., None] + score).flatten(1)
        scores.append(score if price.nothing else score.masked_fill(~growing, -torch.inf))
        tokens.append((place if ids is None else ids[place]).flatten(1))
        origins.append((start + beam).repeat_interleave(width, 1))
        depths += [level] * (wide * width)
        start += scores[-2].shape[1]
        if level + 1 < levels:
            beam = scores[-1].topk(width, -1).indices
            above = beam // width
            ancestors = ancestors.gather(1, above[..., None].expand(-1, -1, ancestors.shape[2]))
    depth = torch.tensor(depths, device=device)
    score = torch.cat(scores, 1).masked_fill(depth >= budget.to(device)[:, None], -torch.inf)
    if not price.nothing:
        score = price.paying(score)
        nodes = _most(score, nodes)
    if not nodes:
        return DraftTree.empty(count, device)
    return rerank(score, torch.cat(tokens, 1), torch.cat(origins, 1), depth, levels, nodes)


def _most(score: Tensor, nodes: int) -> int:
    """Nodes of the largest draft of candidates [B, M], at most `nodes`, where asking is free;
    -inf: none."""
    return min(nodes, int((score != -torch.inf).sum(1).max())) if waits.free(score) else nodes


def rerank(
    score: Tensor, token: Tensor, origin: Tensor, level: Tensor, levels: int, nodes: int
) -> DraftTree:
    """The `nodes` best of M candidates [B, M] that stand level by level (`level` [M], so many
    `levels`). origin: number of the candidate above, -1 for the root; a candidate is never
    better than its origin, and the sort is stable, so parents stay in and in front. Candidates
    of score -inf are left out."""
    count, total = score.shape
    nodes = min(nodes, total)
    best = score.sort(dim=1, descending=True, stable=True)
    size = (best.values[:, :nodes] != -torch.inf).sum(1)  # NaN stays: the tree is refused for it
    node = torch.arange(nodes, device=score.device)
    chosen = torch.where(node < size[:, None], best.indices[:, :nodes], total + node).sort(1).values
    used = chosen < total
    chosen = torch.where(used, chosen, 0)
    where = score.new_full((count, total + 1), -1, dtype=torch.int64)
    where.scatter_(1, torch.where(used, chosen, total), node.expand(count, nodes))
    above = origin.gather(1, chosen)
    parents = torch.where(used & (above >= 0), where.gather(1, above.clamp(min=0)), -1)
    layout = tree_layout(parents, torch.where(used, level[chosen], 0), levels)
    return DraftTree(
        token.gather(1, chosen), parents, size, static_layout=layout, score=score.gather(1, chosen)
    )


def pruned(tree: DraftTree, there: Tensor, shape: TreeShape) -> DraftTree:
    """`tree`, of a static shape, without the nodes that are not in `there` [B, N]. Of every node
    that is, its parent and its elder siblings are."""
    count, n = there.shape
    slot = torch.arange(n, device=there.device)
    there = there & (slot < tree.size[:, None])
    size = there.sum(1)
    width = int(size.max()) if waits.free(size) else n
    if not width:
        return DraftTree.empty(count, there.device)
    if waits.free(there) and bool(there.all()):
        return tree
    kept = (~there).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # their old numbers
    used, number = slot[:width] < size[:, None], there.cumsum(1) - 1
    sampled, proposal = tree.sampled, tree.proposal
    if sampled is not None and proposal is not None:
        sampled = sampled.gather(1, kept)
        proposal = replace(proposal, row=proposal.row.gather(1, kept))
    if len(shape) == shape.depth:
        return DraftTree.chain(tree.tokens[:, :width], size, sampled, proposal)
    above = tree.parents.gather(1, kept)
    parents = torch.where(used & (above >= 0), number.gather(1, above.clamp(min=0)), -1)
    depth = torch.where(used, tree.layout.depth.expand(count, n).gather(1, kept), 0)
    levels = _levels(shape, there.device)
    bounds = max(level.width for level in levels), tuple(len(level.kids) for level in levels)
    layout = tree_layout(parents, depth, shape.depth, *bounds)
    return DraftTree(
        tree.tokens.gather(1, kept), parents, size, sampled, proposal, static_layout=layout
    )


def siblings(
    law: Tensor,
    logits: Tensor,
    kids: Sequence[Sequence[int]],
    rng: Rng,
    growth: Growth | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the children of P parents, the elder ones of all parents first, without replacement
    among siblings.

    law, logits: [B, P, Vd] of the parents' children. kids: for each parent the numbers of its
    children in draw order, which address the random numbers. growth: asked before each is drawn.
    Returns the numbers of all children [K] int64, their places in the draft vocabulary [B, K]
    int64 and [B, K] bool, false where the law had no token left and the best remaining logit
    was taken.
    """
    count, width = law.shape[0], law.shape[2]
    order, numbers = _turns(tuple(map(tuple, kids)), law.device)
    left, every = law[:, order], torch.arange(count, device=law.device)  # a copy
    places: list[Tensor] = []
    fresh: list[Tensor] = []
    for number in numbers:
        some = left[:, : len(number)]
        at, address = order[: len(number)], number.expand(count, -1)
        if growth:
            address = growth.ask(number, at, awaited(some))
        row = every.repeat_interleave(len(number))
        place = rng.draft(some.reshape(-1, width), row, address.reshape(-1)).view(count, -1)
        # A law without mass gives some place without. One of NaN counts as drawn from: then
        # the tree is refused.
        mass = some.gather(2, place[..., None])[..., 0]
        there = ~(mass <= 0)
        if growth:
            growth.tell(number, at, mass)
        if not waits.free(law) or not bool(there.all()):
            spare = logits[:, at].float()
            for old in places:
                spare.scatter_(2, old[:, : len(number), None], -torch.inf)
            place = torch.where(there, place, spare.argmax(-1))
        places.append(place)
        fresh.append(there)
        if len(places) < len(numbers):
            some.scatter_(2, place[..., None], 0.0)
    return torch.cat(numbers), torch.cat(places, 1), torch.cat(fresh, 1)


@functools.lru_cache(maxsize=1024)
def _turns(
    kids: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """[P] the parents, those with more children in front, and for each rank the numbers of the
    children of that rank, in the order of their parents."""
    order = sorted(range(len(kids)), key=lambda j: -len(kids[j]))
    ranks = range(len(kids[order[0]]))
    numbers = [[kids[j][rank] for j in order if len(kids[j]) > rank] for rank in ranks]
    return (
        torch.tensor(order, device=device),
        tuple(torch.tensor(row, device=device) for row in numbers),
    )


def tree_layout(
    parents: Tensor,
    depth: Tensor,
    levels: int,
    most: int | None = None,
    room: tuple[int, ...] | None = None,
) -> Layout:
    """Layout of a dynamic tree whose depths [B, N] are known: a few operations per level,
    where Layout.of takes some per node. most: children of a slot that has the most of them, where
    the host knows it. room: see Layout."""
    count, n = parents.shape
    slot = torch.arange(n + 1, device=parents.device)
    up = torch.cat([parents.new_zeros(count, 1), parents + 1], 1)
    own = torch.eye(n + 1, dtype=torch.bool, device=parents.device)
    mask = own.expand(count, n + 1, n + 1)
    for _ in range(levels):
        mask = own | mask.gather(1, up[..., None].expand(-1, -1, n + 1))
    sibling = (parents[:, :, None] == parents[:, None, :]) & (slot[:n, None] > slot[None, :n])
    rank = sibling.sum(-1)
    width = n if most is None else most  # without asking; what is too wide is filled with -1
    if most is None and waits.free(rank):
        width = int(rank.max()) + 1 if n else 0
    children = parents.new_full((count, n + 1, width + 1), -1)
    rows = torch.arange(count, device=parents.device)[:, None].expand(count, n)
    # Padding stands below the root, behind all that is there: what is too much goes too far.
    children[rows, parents + 1, rank.clamp(max=width)] = slot[:n].expand(count, n)
    return Layout(parents, depth, mask, children[..., :width], rank, levels, room)
