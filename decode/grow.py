"""Drawing a draft, level by level: the one loop behind every chain and every static tree, and
the dynamic tree (EAGLE-2). What is known of the next token is the drafter's own (`LevelSource`).

Where T > 0 a chain's tokens are drawn from the drafter's own distribution under the target's
settings, and so are those of a tree, siblings one after the other without replacement. Else the
most probable tokens are taken, each a point mass. Which nodes exist does not depend on what was
drawn.

Shape letters: B live rows, P parents, Vd draft vocabulary, W width of a level, N nodes, M
candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.decode import devices
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeLayout, TreeShape


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
        """Return a chain of `depth` levels."""
        return Form("chain", depth, depth, TreeShape.chain(depth))

    @staticmethod
    def tree(depth: int, nodes: int = 24, width: int = 4, static: TreeShape | None = None) -> Form:
        """Return a dynamic tree; where T > 0 `static` in its place, drawn."""
        most = max(nodes, len(static or ()))
        return Form("tree", depth, most, static, width, static is not None)


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
        """Return what the nodes of the call before had, [B, P', ..], at their children: [B,
        P, ..]."""
        if self.above is None:
            return values
        if self.above.dim() == 1:
            return values[:, self.above]
        rows = torch.arange(values.shape[0], device=values.device)
        return values[rows[:, None], self.above]


class LevelSource(Protocol):
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
        """Return logits [B, P, Vd] of the children of P nodes, or [B, 1, Vd] where they all
        have the same."""
        ...


def draft(
    source: LevelSource, form: Form, budget: Tensor, sampling: Sampling, rng: Rng
) -> DraftTree:
    """Return a draft of `form` for every row, at most budget [B] levels deep (on the host)."""
    levels = min(form.depth, int(budget.max())) if budget.numel() else 0
    drawn = not sampling.greedy and (form.drawn or form.shape == "chain")
    if levels <= 0:
        return DraftTree.empty(budget.numel(), source.device, drawn and form.static is not None)
    if form.static is None or (form.width and not drawn):
        return dynamic(source, levels, budget, form.width, form.nodes)
    return static(source, form.static.cut(levels), budget, sampling if drawn else None, rng)


def static(
    source: LevelSource, shape: TreeShape, budget: Tensor, sampling: Sampling | None, rng: Rng
) -> DraftTree:
    """Chains and static trees. sampling: what is drawn under, None: nothing is, the children
    of a node are its most probable tokens. Where a distribution has run out of tokens the next best
    one is used as a deterministic candidate."""
    ids, count, device = source.draft_ids(), budget.shape[0], source.device
    tokens = torch.empty(count, len(shape), dtype=torch.int64, device=device)
    drawn, all_probs = torch.ones_like(tokens, dtype=torch.bool), list[Tensor]()
    for level in _levels(shape, device):
        logits = source.open(shape.depth) if not level.depth else None
        if logits is None:
            seen = None if level.seen is None else level.seen.expand(count, -1, -1)
            above = tokens.index_select(1, level.parents)
            logits = source.level(Nodes(level.depth, above, level.above, seen))
        nodes: slice | Tensor = level.nodes
        if sampling is None:
            ranks = max(map(len, level.kids))
            best = logits.topk(ranks, -1).indices if ranks > 1 else logits.argmax(-1, keepdim=True)
            place = best.expand(-1, len(level.kids), -1)[:, level.parent, level.rank]
        else:
            all_probs.append(sampling.draft_probs(logits.flatten(0, 1)).view(logits.shape))
            probs, logits = (t.expand(-1, len(level.kids), -1) for t in (all_probs[-1], logits))
            nodes, place, fresh = siblings(probs, logits, level.kids, rng)
            drawn[:, nodes] = fresh
        tokens[:, nodes] = place if ids is None else ids[place]
    if sampling is None:
        return DraftTree.static(shape, tokens, shape.size_at(budget))
    probs = torch.cat(all_probs, 1)
    row = _probs_rows(shape, probs.shape[1] > shape.depth, device).expand(count, -1)
    return DraftTree.static(shape, tokens, shape.size_at(budget), drawn, Proposal(probs, row, ids))


def siblings(
    probs: Tensor, logits: Tensor, kids: Sequence[Sequence[int]], rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the children of P parents, the elder ones of all parents first, without replacement
    among siblings.

    probs, logits: [B, P, Vd] of the parents' children. kids: for each parent the numbers of
    its children in draw order, which address the random numbers. Returns the numbers of all
    children [K] int64, their places in the draft vocabulary [B, K] int64 and [B, K] bool, false
    where the distribution had no token left and the best remaining logit was taken.
    """
    count, parents, width = probs.shape
    order, ranks, nodes = _turns(tuple(map(tuple, kids)), count, probs.device)
    left = probs[:, order] if len(ranks) > 1 else probs  # a copy, which is written to
    places, masses = list[Tensor](), list[Tensor]()
    for row, number in ranks:
        some = left[:, : len(number) // count]
        place = rng.draft(some.reshape(-1, width), row, number).view(count, -1, 1)
        places.append(place)
        masses.append(some.gather(2, place))
        if len(places) < len(ranks):
            some.scatter_(2, place, 0.0)
    # A distribution without mass gives some place without. One of NaN counts as drawn from,
    # wherever its NaN is: then the tree is refused.
    there = ~(torch.cat(masses, 1) <= 0)
    if not devices.on_cpu(probs) or not bool(there.all()):
        there[:, :parents] |= probs.sum(2, keepdim=True).isnan()[:, order]
        # Those that are masked still stand above those that were taken.
        spare, done = logits[:, order].float().clamp_(min=torch.finfo(torch.float32).min), 0
        for rank, place in enumerate(places):  # the best remaining token, rank by rank
            some, has_mass = spare[:, : place.shape[1]], there[:, done : done + place.shape[1]]
            places[rank] = torch.where(has_mass, place, some.argmax(2, keepdim=True))
            some.scatter_(2, places[rank], -torch.inf)
            done += place.shape[1]
    return nodes, torch.cat(places, 1)[..., 0], there[..., 0]


def dynamic(source: LevelSource, levels: int, budget: Tensor, width: int, nodes: int) -> DraftTree:
    """EAGLE-2 (Li et al. 2406.16858): expand the `width` best nodes of every level by
    cumulative log-probability, then keep the `nodes` best candidates of all levels. Candidates
    are the most probable tokens, each a point mass. The best lie in `nodes` levels of `nodes`."""
    levels, device, ids = min(levels, nodes), source.device, source.draft_ids()
    logits = source.open(levels)
    count, width = logits.shape[0], min(width, nodes, logits.shape[2])
    score, place = torch.log_softmax(logits[:, 0].float(), -1).topk(width, -1)  # [B, W]
    scores, tokens = [score], [place if ids is None else ids[place]]
    origins, depths = [torch.full_like(place, -1)], [torch.zeros_like(place[0])]
    beam = torch.arange(width, device=device).expand(count, width)
    above = torch.zeros(width, dtype=torch.int64, device=device)
    ancestors = torch.zeros(count, width, 0, dtype=torch.bool, device=device)
    start = 0
    for level in range(1, levels):
        # The beam: W candidates of the last level, the best in front, `beam` their numbers in
        # it, `above` which of the beam before they hang below.
        total = scores[-1].gather(1, beam)
        own = torch.eye(width, dtype=torch.bool, device=device)  # of a level none is above another
        ancestors = torch.cat([ancestors, own.expand(count, width, width)], 2)
        logits = source.level(Nodes(level, tokens[-1].gather(1, beam), above, ancestors))
        found = torch.log_softmax(logits.float(), -1).topk(width, -1)
        score, place = (t.expand(-1, width, -1) for t in found)  # [B, W, children]
        scores.append((total[..., None] + score).flatten(1))
        tokens.append((place if ids is None else ids[place]).flatten(1))
        origins.append((start + beam).repeat_interleave(width, 1))
        depths.append(torch.full_like(tokens[-1][0], level))
        start += scores[-2].shape[1]
        if level + 1 < levels:
            beam = scores[-1].topk(width, -1).indices
            above = beam // width
            ancestors = ancestors.gather(1, above[..., None].expand(-1, -1, ancestors.shape[2]))
    depth = torch.cat(depths)
    deep = depth >= devices.send(budget, device)[:, None]
    score = torch.cat(scores, 1).masked_fill(deep, -torch.inf)
    return rerank(score, torch.cat(tokens, 1), torch.cat(origins, 1), depth, levels, nodes)


def rerank(
    score: Tensor, token: Tensor, origin: Tensor, level: Tensor, levels: int, nodes: int
) -> DraftTree:
    """Return the `nodes` best of M candidates [B, M] that stand level by level (`level`
    [M], so many `levels`). origin: number of the candidate above, -1 for the root; a
    candidate is never better than its origin, and the sort is stable, so parents stay in
    and in front. Candidates of score -inf are left out."""
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
    layout = TreeLayout(parents, torch.where(used, level[chosen], 0), levels)
    return DraftTree(
        token.gather(1, chosen), parents, size, static_layout=layout, score=score.gather(1, chosen)
    )


# --- how a static shape is drafted, worked out once a shape

Kids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Level:
    """How the nodes of one level of a static shape hang below the P nodes of the level before that
    have children (at depth 0 the committed token).

    nodes: theirs. kids: the children of each parent in draw order. parent, rank: [n] int64 place
    of a node's parent among the P, and its own among its siblings. parents: [P] their node numbers.
    above, seen: as in `Nodes`."""

    depth: int
    nodes: slice
    kids: Kids
    parent: Tensor
    rank: Tensor
    parents: Tensor
    above: Tensor | None
    seen: Tensor | None


@functools.lru_cache(maxsize=256)
def _levels(shape: TreeShape, device: torch.device) -> tuple[Level, ...]:
    number = {path: i for i, path in enumerate(shape.paths)}
    before: list[tuple[int, ...]] = [()]  # nodes of the level before that have children
    read: list[int] = []  # nodes that had children so far
    found = []
    for depth in range(shape.depth):
        nodes = shape.level(depth)
        paths = [shape.paths[i] for i in nodes]
        parents = list(dict.fromkeys(path[:-1] for path in paths))
        numbers = [number[parent] for parent in parents] if depth else []
        read += numbers
        seen = None
        if depth and shape != TreeShape.chain(len(shape)):
            seen = shape.layout(device).mask[:, 1:, 1:][:, numbers][:, :, read]
        above = [before.index(path[:-1]) for path in parents] if depth else [0]
        same = above == list(range(len(before)))
        level = Level(
            depth=depth,
            nodes=slice(nodes.start, nodes.stop),
            kids=tuple(tuple(i for i in nodes if shape.paths[i][:-1] == p) for p in parents),
            parent=torch.tensor([parents.index(path[:-1]) for path in paths], device=device),
            rank=torch.tensor([path[-1] for path in paths], device=device),
            parents=torch.tensor(numbers, dtype=torch.int64, device=device),
            above=None if same else torch.tensor(above, device=device),
            seen=seen,
        )
        found.append(level)
        before = parents if depth else [()]
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _probs_rows(shape: TreeShape, each: bool, device: torch.device) -> Tensor:
    """[N] int64: the distribution that each node is drawn from, where every parent has its own
    (`each`), and where a level has one."""
    parents = list(dict.fromkeys(path[:-1] for path in shape.paths))
    rows = [parents.index(path[:-1]) if each else len(path) - 1 for path in shape.paths]
    return torch.tensor(rows, dtype=torch.int64, device=device)


class Turns(NamedTuple):
    """order: [P] the parents, those with more children in front. ranks: for each rank of children
    the row and the number [B * P'] of each, row by row. nodes: [K] numbers of all, rank by rank."""

    order: Tensor
    ranks: tuple[tuple[Tensor, Tensor], ...]
    nodes: Tensor


@functools.lru_cache(maxsize=1024)
def _turns(kids: Kids, count: int, device: torch.device) -> Turns:
    order = sorted(range(len(kids)), key=lambda j: -len(kids[j]))
    ranks = [
        torch.tensor([kids[j][rank] for j in order if len(kids[j]) > rank], device=device)
        for rank in range(len(kids[order[0]]))
    ]
    row = torch.arange(count, device=device)
    turns = ((row.repeat_interleave(len(n)), n.repeat(count)) for n in ranks)
    return Turns(torch.tensor(order, device=device), tuple(turns), torch.cat(ranks))
