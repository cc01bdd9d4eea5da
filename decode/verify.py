"""Verification: which path of the draft the target accepts, and the bonus token after it. The heart.

Every rule here leaves the target's law unchanged (docs/lossless.md has the proofs in a few lines):

walk        trees of deterministic candidates: draw a token from the target's law and step down if it is a child.
            Optimal for such trees (E[accepted] = sum over nodes of the target's path probability), and what both
            rules below reduce to there.
rejection   top-down: siblings in draw order, accept with min(1, r(x) / q(x)), else r <- norm([r - q]+).
            Leviathan et al. 2211.17192 on chains; recursive rejection (RSD 2402.14160, Sequoia 2402.12374) on trees.
            Each candidate carries its own q: a point mass, or the law it was drawn from.
traversal   leaf to root (2505.12398), generalised to a q per candidate; equals block verification (Sun et al.
            2403.10444) on chains and accepts at least as much as rejection there.

`rng` is asked for accept(p), first(p) and draw(weights) only: an enumerator in its place walks every branch.
Nothing here knows a temperature: T = 0 is a law with one token.

Shape letters: B rows, N nodes, C siblings, D levels, R rows in hand, S support size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from conf.errors import UserError
from decode.sampling import Law, Support
from decode.tree import DraftTree


class Coins(Protocol):
    """What verification asks of its random numbers (decode.rng.Rng, or an enumerator)."""

    def accept(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...
    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...
    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...


_TINY = torch.finfo(torch.float64).tiny
Rest = tuple[Tensor, Tensor, Callable[[Tensor], Support]]


@dataclass(frozen=True)
class Verdict:
    """path: [B, D] int64 accepted node numbers from the top, -1 padded. length: [B]. bonus: [B] token ids."""

    path: Tensor
    length: Tensor
    bonus: Tensor


def verify(tree: DraftTree, law: Law, rng: Coins, rule: str = "traversal") -> Verdict:
    """Accepted path and bonus token of every row. rule: "rejection" or "traversal" (the default accepts more)."""
    if rule not in RULES:
        raise UserError(f"verify={rule}: unknown; use one of {', '.join(RULES)}")
    deterministic = tree.sampled is None or tree.proposal is None
    return walk(tree, law, rng) if deterministic else RULES[rule](tree, law, rng)


def _start(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, device = tree.tokens.shape[0], tree.tokens.device
    path = torch.full((rows, tree.layout.levels), -1, dtype=torch.int64, device=device)
    zero = torch.zeros(rows, dtype=torch.int64, device=device)
    return path, zero, zero.clone(), torch.arange(rows, device=device), zero.clone()


def _children(tree: DraftTree, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Node numbers [R, C] below `slots` [R] (clamped to be readable) and which of them are there."""
    table = tree.layout.children
    kids = table[rows if table.shape[0] > 1 else torch.zeros_like(rows), slots]
    return kids.clamp(min=0), (kids >= 0) & (kids < tree.size[rows, None])


def walk(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """For trees whose candidates are all deterministic: sample, then match."""
    path, length, bonus, rows, slots = _start(tree)
    for level in range(tree.layout.levels + 1):
        support = law.at(rows, slots)
        token = support.token(rng.draw(support.probs, rows, slots - 1))
        bonus[rows] = token  # rows that walk on overwrite it
        if level == tree.layout.levels:
            break
        kids, there = _children(tree, rows, slots)
        match = there & (tree.tokens[rows[:, None], kids] == token[:, None])
        hit = match.any(1)
        node = kids.gather(1, match.to(torch.uint8).argmax(1, keepdim=True))[:, 0]
        rows, node = rows[hit], node[hit]
        if rows.numel() == 0:
            break
        path[rows, level] = node
        length[rows] += 1
        slots = node + 1
    return Verdict(path, length, bonus)


class _Siblings:
    """The proposals q_j of the children of R slots, in draw order; earlier siblings are removed as they fail.

    What is left of a law is kept as `weight` [R, S] and `out` [R] float64, together of mass one. Usually S is the
    support of the law and out is 0. A dense law under a draft vocabulary that holds all candidates is looked at there
    alone (S = Vd): the other tokens only ever keep their ratios, so their mass `out` says all of them.
    """

    def __init__(self, tree: DraftTree, rows: Tensor, kids: Tensor, support: Support, vocab_size: int) -> None:
        assert tree.proposal is not None and tree.sampled is not None
        self.proposal, self.support, self.vocab_size = tree.proposal, support, vocab_size
        self.tokens = tree.tokens[rows[:, None], kids]  # [R, C]
        self.sampled = tree.sampled[rows[:, None], kids]  # [R, C]
        self.place, self.inside = self.proposal.place(self.tokens)
        # All sampled siblings share one law row: take it from the first of them.
        one = kids.gather(1, self.sampled.to(torch.uint8).argmax(1, keepdim=True))[:, 0]
        self.law = self.proposal.law[rows, self.proposal.row[rows, one]]  # [R, Vd], a copy
        self.left = torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
        vocab = self.proposal.vocab if support.ids is None else None
        self.vocab = vocab = vocab if vocab is not None and bool(self.inside.all()) else None
        self.weight = support.probs if vocab is None else support.probs[:, vocab]
        self.out = torch.zeros_like(self.left)
        if vocab is not None:
            whole, part = (p.sum(-1, dtype=torch.float64) for p in (support.probs, self.weight))
            self.out = (whole - part).clamp_(min=0)

    def ratio(self, weight: Tensor, carried: Tensor, j: int) -> Tensor:
        """carried * r(x_j) / q_j(x_j), at most 1: [R] float64. A token without proposal mass gives 0."""
        place, inside = self.place[:, j, None], self.inside[:, j, None]
        mass = torch.where(inside, self.law.gather(1, place), 0.0)[:, 0].to(torch.float64) / self.left
        q = torch.where(self.sampled[:, j], mass, 1.0)
        token = self.tokens[:, j]
        r = Support(self.support.ids, weight).of(token) if self.vocab is None else weight.gather(1, place)[:, 0]
        return torch.where(q > 0, carried * r.to(torch.float64) / q, 0.0).clamp(max=1)

    def residual(self, weight: Tensor, out: Tensor, carried: Tensor, j: int) -> tuple[Tensor, Tensor, Tensor]:
        """norm([carried * law - q_j]+) as weight and out, and the sum before normalising [R] float64.

        A candidate that can fail has carried * weight(x_j) < q_j(x_j), so its own place is 0 whatever q_j is, a law
        or a point mass. A sum of 0 (equal laws, up to rounding) leaves nothing to normalise: the rejection that led
        here had probability 0 and the law is kept.
        """
        ids = self.support.ids
        q = self.law if self.vocab is not None else self.proposal.read(self.law, ids, self.vocab_size)
        scale = torch.where(self.sampled[:, j], 1 / self.left, 0.0)[:, None]
        rest = weight * carried.to(weight.dtype)[:, None]
        rest.sub_((q * scale.to(q.dtype)).to(weight.dtype)).clamp_(min=0)
        token = self.tokens[:, j, None]
        if ids is None:
            rest.scatter_(1, token if self.vocab is None else self.place[:, j, None], 0.0)
        else:
            rest.masked_fill_(ids == token, 0.0)
        rest_out = out * carried
        total = rest.sum(-1, dtype=torch.float64) + rest_out
        some, by = total > 0, total.clamp(min=_TINY)
        return (torch.where(some[:, None], rest / by.to(rest.dtype)[:, None], weight),
                torch.where(some, rest_out / by, out), total)  # fmt: skip

    def remove(self, j: int) -> None:
        """Sibling j stands: a later draw without replacement had its token removed from the law."""
        if self.proposal.replacement or j + 1 == self.tokens.shape[1]:
            return
        place, inside = self.place[:, j, None], self.inside[:, j, None]
        self.law.scatter_(1, place, torch.where(inside, 0.0, self.law.gather(1, place)))
        self.left = self.law.sum(-1, dtype=torch.float64).clamp_(min=_TINY)

    def whole(self, weight: Tensor, out: Tensor, at: Tensor) -> Support:
        """What is left of the laws `at` [R'], all tokens of them."""
        ids, weight = self.support.ids, weight[at]
        if self.vocab is None:
            return Support(None if ids is None else ids[at], weight)
        shrunk = torch.where(self.out[at] > 0, out[at] / self.out[at].clamp(min=_TINY), 0.0)
        probs = self.support.probs[at] * shrunk.to(weight.dtype)[:, None]
        return Support(None, probs.index_copy_(1, self.vocab, weight))


def _nobody(mask: Tensor) -> bool:
    """True when no row is left, where asking is free: on an accelerator the loop runs on rather than wait."""
    return mask.device.type == "cpu" and not bool(mask.any())


def rejection(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """Top-down recursive rejection; needs the target's law only where the walk goes."""
    path, length, bonus, rows, slots = _start(tree)
    for level in range(tree.layout.levels + 1):
        support, chosen = law.at(rows, slots), torch.full_like(rows, -1)
        siblings = None
        if level < tree.layout.levels:
            kids, there = _children(tree, rows, slots)
            siblings = _Siblings(tree, rows, kids, support, law.vocab_size)
            weight, out = siblings.weight, siblings.out
            whole = torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
            for j in range(kids.shape[1]):
                trying = there[:, j] & (chosen < 0)
                if _nobody(trying):
                    break
                chance = torch.where(trying, siblings.ratio(weight, whole, j), 1.0)
                yes = rng.accept(chance, rows, kids[:, j]) & trying
                chosen = torch.where(yes, kids[:, j], chosen)
                failed = trying & ~yes
                if _nobody(failed):
                    break
                rest, rest_out, _ = siblings.residual(weight, out, whole, j)
                weight, out = torch.where(failed[:, None], rest, weight), torch.where(failed, rest_out, out)
                siblings.remove(j)
        stay = chosen < 0
        end = stay.nonzero()[:, 0]
        if end.numel():
            last = siblings.whole(weight, out, end) if siblings else support  # at the last level nobody walks on
            bonus[rows[end]] = last.token(rng.draw(last.probs, rows[end], slots[end] - 1))
        rows, node = rows[~stay], chosen[~stay]
        if rows.numel() == 0:
            break
        path[rows, level] = node
        length[rows] += 1
        slots = node + 1
    return Verdict(path, length, bonus)


def traversal(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """Leaf to root. A slot is accepted with the probability w that is left to it after all its children failed.

    Neither w nor the residual depends on a coin, so both are computed for every slot, one level and one sibling rank
    at a time; then the first slot in post-order whose own coin falls below its w ends the path. Laws are needed where
    children hang (a leaf's only if it ends the path) and only below slots that can be reached at all (w > 0).
    """
    count, n = tree.tokens.shape
    device = tree.tokens.device
    every = torch.arange(count, device=device)
    carried = torch.zeros(count, n + 1, dtype=torch.float64, device=device)
    carried[:, 0] = 1
    depth = torch.cat([tree.layout.depth.new_full((tree.layout.depth.shape[0], 1), -1), tree.layout.depth], 1)
    present = torch.arange(n + 1, device=device) <= tree.size[:, None]
    ends: list[Rest] = []  # per level: which slots were opened, and the residual law of some of them
    for level in range(tree.layout.levels):
        rows, slots = ((depth == level - 1) & present & (carried > 0)).nonzero(as_tuple=True)
        kids, there = _children(tree, rows, slots)
        inner = there[:, 0].nonzero()[:, 0]
        rows, slots, kids, there = rows[inner], slots[inner], kids[inner], there[inner]
        if rows.numel() == 0:
            break
        siblings = _Siblings(tree, rows, kids, law.at(rows, slots), law.vocab_size)
        weight, out, w = siblings.weight, siblings.out, carried[rows, slots]
        for j in range(kids.shape[1]):
            old = there[:, j]
            if _nobody(old):
                break
            carried[rows[old], kids[old, j] + 1] = siblings.ratio(weight, w, j)[old]
            rest, rest_out, total = siblings.residual(weight, out, w, j)
            spent = total + 1 - w
            left = torch.where(spent > 0, total / spent.clamp(min=_TINY), 1.0)
            weight, out = torch.where(old[:, None], rest, weight), torch.where(old, rest_out, out)
            w = torch.where(old, left, w)
            siblings.remove(j)
        carried[rows, slots] = w
        ends.append((rows, slots, functools.partial(siblings.whole, weight, out)))
    carried[:, 0] = 1  # the root never rejects; rounding must not either
    order = tree.layout.postorder.expand(count, n + 1)
    chance = torch.where(present, carried, 0.0).gather(1, order)
    end = order.gather(1, rng.first(chance, every, order - 1)[:, None])[:, 0]
    mask = tree.layout.mask
    on_path = mask[every if mask.shape[0] > 1 else torch.zeros_like(every), end, 1:]
    node = torch.arange(n, device=device).expand(count, n)
    place = torch.where(on_path, tree.layout.depth.expand(count, n), tree.layout.levels)
    path = torch.full((count, tree.layout.levels + 1), -1, dtype=torch.int64, device=device)
    path.scatter_(1, place, torch.where(on_path, node, -1))
    return Verdict(path[:, : tree.layout.levels], on_path.sum(-1), _bonus(law, rng, end, ends))


def _bonus(law: Law, rng: Coins, end: Tensor, ends: list[Rest]) -> Tensor:
    """The token after slot `end` [B]: from the residual where its children failed, from the law at a leaf."""
    bonus = torch.zeros_like(end)
    leaf = torch.ones_like(end, dtype=torch.bool)
    for rows, slots, rest in ends:
        hit = (end[rows] == slots).nonzero()[:, 0]
        if hit.numel():
            chosen = rest(hit)
            bonus[rows[hit]] = chosen.token(rng.draw(chosen.probs, rows[hit], slots[hit] - 1))
            leaf[rows[hit]] = False
    rows = leaf.nonzero()[:, 0]
    if rows.numel():
        support = law.at(rows, end[rows])
        bonus[rows] = support.token(rng.draw(support.probs, rows, end[rows] - 1))
    return bonus


RULES = {"rejection": rejection, "traversal": traversal}
