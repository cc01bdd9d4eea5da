"""Verification: which path of the draft the target accepts, and the bonus token after it. The
heart.

Every rule here leaves the target's law unchanged (docs/lossless.md has the proofs in a few
lines):

walk        trees of deterministic candidates: draw a token from the target's law and step down
            if it is a child. Optimal for such trees (E[accepted] = sum over nodes of the
            target's path probability), and what both rules below reduce to there.
rejection   top-down: siblings in draw order, accept with min(1, p(x) / q(x)), else p <-
            norm([p - q]+). Leviathan et al. 2211.17192 on chains; recursive rejection (RSD
            2402.14160, Sequoia 2402.12374) on trees. Each candidate carries its own q: a point
            mass, or the law it was drawn from.
traversal   leaf to root (2505.12398), generalised to a q per candidate; equals block
            verification (Sun et al. 2403.10444) on chains and accepts at least as much as
            rejection there.

All arithmetic on laws is float64, whatever dtype they come in: products of ratios over the
levels of a draft leave the range of float32, and a quotient that became NaN would read as
"nothing is left". What is not finite all the same is reported to the law, whose `check`
refuses the cycle before anything is committed.

`rng` is asked for accept(p), first(p) and draw(weights) only: an enumerator in its place walks
every branch. Nothing here knows a temperature: T = 0 is a law with one token.

Shape letters: B rows, N nodes, C siblings, D levels, R rows in hand, S support size, Vd draft
vocabulary, G groups of I slots: all slots that have been found in one, or one of each row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.errors import UserError
from decode import unasked, waits
from decode.sampling import Law, Support
from decode.tree import DraftTree, Proposal


class Coins(Protocol):
    """What verification asks of its random numbers (decode.rng.Rng, or an enumerator)."""

    def accept(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...
    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...
    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Verdict:
    """path: [B, D] int64 accepted node numbers from the top, -1 padded. length: [B]. bonus:
    [B] token ids.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor


def verify_chain(
    laws: Tensor, proposals: Tensor, drafted: Tensor, coins: Tensor, last_coin: float
) -> list[int]:
    """The accept rule for one chain, to be read: what every rule below does for a tree and
    many rows.

    laws: [K + 1, V] float64, the target's law before each drafted token and after the last.
    proposals: [K, V] float64, the law that each drafted token was drawn from. drafted: [K]
    int64. coins: [K] uniforms, one for each test;
    last_coin: the uniform of the last draw. Returns the tokens that are emitted: an accepted
        prefix, then one more.

    A token x comes out at some place with probability q(x) min(1, p(x) / q(x)) = min(p(x),
    q(x)) when it was drafted and accepted, and with probability (1 - sum of min(p, q)) times
    norm([p - q]+)(x) = [p(x) - q(x)]+ when another one was rejected. The two add up to p(x),
    whatever q is.
    """
    emitted: list[int] = []
    for law, proposal, token, coin in zip(
        laws, proposals, drafted.tolist(), coins.tolist(), strict=False
    ):
        accept_probability = min(1.0, float(law[token] / proposal[token]))
        if coin < accept_probability:
            emitted.append(token)
            continue
        residual = (law - proposal).clamp(min=0)
        return [*emitted, _inverse(residual, last_coin)]
    return [*emitted, _inverse(laws[-1], last_coin)]


def _inverse(weights: Tensor, coin: float) -> int:
    """The first token whose cumulative weight exceeds `coin` times the sum of `weights` [V]."""
    cumulative = weights.cumsum(0)
    return int((cumulative > coin * cumulative[-1]).view(torch.uint8).argmax())


# --- the same for a tree and many rows


def verify(tree: DraftTree, law: Law, rng: Coins, rule: str = "traversal") -> Verdict:
    """Accepted path and bonus token of every row. rule: "rejection" or "traversal" (the
    default accepts more).

    Ask `law.check()` before anything is committed: it raises where a law, a chance or a
    residual was not finite.
    """
    if rule not in RULES:
        raise UserError(f"verify={rule}: unknown; use one of {', '.join(RULES)}")
    deterministic = tree.sampled is None or tree.proposal is None
    if deterministic or not tree.width:
        return walk(tree, law, rng)
    return RULES[rule](tree, law, rng)


def _start(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, device = tree.tokens.shape[0], tree.tokens.device
    path = torch.full((rows, tree.layout.levels), -1, dtype=torch.int64, device=device)
    zero = torch.zeros(rows, dtype=torch.int64, device=device)
    return path, zero, zero.clone(), torch.arange(rows, device=device), zero.clone()


def children(tree: DraftTree, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Node numbers [.., C] below `slots` [..] of `rows` [..] (clamped to be readable) and which
    of them are there.
    """
    table = tree.layout.children
    kids = table[rows, slots] if table.shape[0] > 1 else table[0, slots]
    return kids.clamp(min=0), (kids >= 0) & (kids < tree.size[rows][..., None])


def walk(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """For trees whose candidates are all deterministic: sample, then match."""
    if not waits.free(tree.tokens):
        return Verdict(*unasked.walk(tree, law, rng))
    path, length, bonus, rows, slots = _start(tree)
    for level in range(tree.layout.levels + 1):
        support = law.at(rows, slots)
        token = support.token(rng.draw(support.probs, rows, slots - 1))
        bonus[rows] = token  # rows that walk on overwrite it
        if level == tree.layout.levels:
            break
        kids, there = children(tree, rows, slots)
        match = there & (tree.tokens[rows[:, None], kids] == token[:, None])
        on = match.any(1)
        if not bool(on.any()):
            break
        rows, place = rows[on], match[on].view(torch.uint8).argmax(1, keepdim=True)
        node = kids[on].gather(1, place)[:, 0]
        path[rows, level] = node
        length[rows] += 1
        slots = node + 1
    return Verdict(path, length, bonus)


# Mass and probability below it are taken for 0, so that no quotient leaves the range of float64.
NOTHING = 1e-300


class Siblings:
    """Slots and their children in draw order: with what chance each child is reached, and what is
    left of the slots' laws when all have failed. All float64.

    A slot is reached with probability w and has the law p; its child j is x_j, drawn from q_j =
    scale_j q with its elder siblings' tokens removed (a point mass where it is deterministic).
    The part of w p that no child has taken yet is left_0 = w p, left_j+1 = [left_j - d_j q_j]+
    without x_j, where d_j = (sum of left_j) + (1 - w) is the chance that nobody was accepted
    before it, in the slot or without it. Child j is reached with left_j(x_j) / (d_j q_j(x_j)).
    In place of the normalised law after every failure these are that law times d_j, so nothing
    is divided but what is asked for. What follows a residual of 0 (equal laws, up to rounding)
    has probability 0.

    rows, slots: [G, I], read only where `used` [G, I] (None: everywhere). kids, there, below: [G,
    I, C], their children, which of them are there, and their slots, N + 1 where none is. A dense
    law under a draft vocabulary that holds all candidates is looked at there alone, S = Vd, where
    asking is free: the other tokens only ever keep their ratios, so their mass says all of them.

    left: [G, I, S + 3]: the tokens, the mass outside the draft vocabulary, 1 - w, and a place for
    tokens that are in no place.
    """

    def __init__(
        self, tree: DraftTree, law: Law, rows: Tensor, slots: Tensor, used: Tensor | None = None
    ) -> None:
        assert tree.proposal is not None
        self.law, self.rows, self.slots, self.used = law, rows, slots, used
        self.kids, self.there = children(tree, rows, slots)
        if used is not None:
            self.there = self.there & used[..., None]
        self.below = torch.where(self.there, self.kids + 1, tree.width + 1)
        groups, inner, _ = self.kids.shape
        self.support, self.lawless = law.read(rows.reshape(-1), slots.reshape(-1))
        each = rows[..., None]
        # What a draft holds may be anything where it is padding, and where it is refused later.
        tokens = tree.tokens[each, self.kids].clamp_(0, law.vocab_size - 1)
        place, known = tree.proposal.place(tokens)
        proposal = self._proposals(tree, tree.proposal, tokens, place, known)
        ids, probs = self.support.ids, self.support.probs
        if used is not None:  # of slots that nothing leads to the law may be anything
            probs = probs.masked_fill(self.lawless[:, None], 0.0)
        self.vocab, found = None, self.there
        if ids is not None:
            same = ids.view(groups, inner, 1, -1) == tokens[..., None]
            place, found = same.view(torch.uint8).argmax(-1), found & same.any(-1)
        elif waits.free(known) and bool((known | ~self.there).all()):
            self.vocab = tree.proposal.vocab
        if ids is None and self.vocab is None:
            place = tokens
        if self.vocab is None:
            self.taken = tree.proposal.read(proposal, ids, law.vocab_size)
        else:
            # Summed, not taken as what the others leave of one: that would be noise where it
            # is small.
            outside = probs.index_fill(1, self.vocab, 0.0).sum(-1, dtype=torch.float64)
            self.outside = outside.view(groups, inner)
            self.taken, probs = proposal, probs[:, self.vocab]
        self.size = probs.shape[1]
        self.probs, self.taken = (t.view(groups, inner, -1) for t in (probs, self.taken))
        self.place = torch.where(found, place, self.size + 2)
        self.left = self.taken.new_empty(groups, inner, self.size + 3)
        self.left[..., self.size :] = 0.0
        self.judged: list[tuple[slice, int, Tensor, Tensor | None]] = []

    def _proposals(
        self, tree: DraftTree, proposal: Proposal, tokens: Tensor, place: Tensor, known: Tensor
    ) -> Tensor:
        """The laws [R, Vd] that the children were drawn from, and of every child [G, I, C]
        `scale` (0: deterministic) and `given`, the chance that it was drawn, infinite where it
        could not be.

        A law that has run out of tokens counts for nothing: its siblings are judged as
        deterministic from there on, which is right for any candidate, also one that was drawn
        from what is next to nothing."""
        assert tree.sampled is not None
        sampled = tree.sampled[self.rows[..., None], self.kids] & self.there
        # All sampled siblings share one law row: take it from the first of them. Deterministic
        # ones need none, and what stands in their place is never looked at.
        first = self.kids.gather(2, sampled.view(torch.uint8).argmax(2, keepdim=True))[..., 0]
        law_row = proposal.row[self.rows, first].clamp(0, proposal.law.shape[1] - 1)
        law = proposal.law[self.rows, law_row].to(torch.float64)
        law = law.masked_fill_(~sampled.any(2, keepdim=True), 0.0)
        mass = law.sum(-1, keepdim=True)
        if not proposal.replacement and tokens.shape[2] > 1:
            # A later draw had the tokens of its elder siblings removed from its law.
            size = law.shape[2]
            rest, gone, masses = F.pad(law, (0, 1)), torch.where(known, place, size), [mass]
            for j in range(tokens.shape[2] - 1):
                rest.scatter_(2, gone[..., j, None], 0.0)
                masses.append(rest[..., :size].sum(-1, keepdim=True))
            mass = torch.cat(masses, 2)
        sampled = sampled & ~(mass < NOTHING)
        self.scale = torch.where(sampled, 1 / mass, 0.0)  # NaN stays NaN
        drawn = torch.where(known, law.gather(2, place), 0.0) * self.scale
        given = torch.where(sampled, drawn, 1.0)
        self.given = given.masked_fill_(given < NOTHING, torch.inf)
        return law.flatten(0, 1)

    def judge(self, part: slice, w: Tensor, ranks: int) -> Tensor:
        """Chances [G, I', ranks] that the children of the slots `part` are reached, who are
        themselves with w [G, I'] float64 and have at most so many children. The first ones hang
        on nothing that is left of the law, so a level of them needs no more than that."""
        if ranks == 1:
            self.judged.append((part, ranks, w, None))
            return (w[..., None] * self.first[:, part]).clamp_(max=1)
        left = self._open(part, w)
        got, before = [], [torch.ones_like(left[..., :1])]
        for j in range(ranks):
            got.append(left.gather(2, self.place[:, part, j, None]))
            if j + 1 < ranks:
                before.append(self._fail(part, self.place, self.scale, before[-1], slice(j, j + 1)))
        self.judged.append((part, ranks, w, before[-1]))
        chance = torch.cat(got, 2) / torch.cat(before, 2).clamp_(min=NOTHING)
        return (chance / self.given[:, part, :ranks]).clamp_(max=1)

    @functools.cached_property
    def first(self) -> Tensor:
        """[G, I, 1] p(x_0) / q_0(x_0)."""
        place = self.place[..., :1]
        mass = self.probs.gather(2, place.clamp(max=self.size - 1)).to(torch.float64)
        return torch.where(place < self.size, mass, 0.0) / self.given[..., :1]

    def _open(self, part: slice, w: Tensor) -> Tensor:
        """left_0 of the slots `part`."""
        left, size = self.left[:, part], self.size
        torch.mul(self.probs[:, part], w[..., None], out=left[..., :size])
        if self.vocab is not None:
            left[..., size] = w * self.outside[:, part]
        left[..., size + 1] = 1 - w
        return left

    def _fail(
        self, part: slice, place: Tensor, scale: Tensor, before: Tensor | None, rank: slice
    ) -> Tensor:
        """A rank of children fails: d_j+1, [G, I', 1]. before: d_j, None for 1. Its own token is
        left out whatever q_j is: where a candidate can fail nothing is left of it."""
        left, scale = self.left[:, part], scale[:, part, rank]
        by = scale if before is None else before * scale
        body = left[..., : self.size]
        body.addcmul_(self.taken[:, part], by, value=-1).clamp_(min=0)
        left.scatter_(2, place[:, part, rank], 0.0)
        return left[..., : self.size + 2].sum(-1, keepdim=True)

    def close(self) -> Tensor:
        """[G, I] what is left of each w when all children have failed. Reports what was not
        finite. Call after every slot was judged."""
        parts, ranks, ws, befores = zip(*self.judged, strict=True)
        w = torch.cat(ws, 1)
        fresh = [before is None for before in befores]
        if all(fresh):
            self._open(slice(None), w)
        else:
            for part, own, is_fresh in zip(parts, ws, fresh, strict=True):
                if is_fresh:
                    self._open(part, own)
        last = list(zip(parts, ranks, strict=True))
        place, scale = (
            torch.cat([t[:, part, rank - 1 : rank] for part, rank in last], 1)
            for t in (self.place, self.scale)
        )
        before = None
        if not all(fresh):
            both = zip(ws, befores, strict=True)
            known = [torch.ones_like(own[..., None]) if b is None else b for own, b in both]
            before = torch.cat(known, 1)
        after = self._fail(slice(None), place, scale, before, slice(None))[..., 0]
        self.rest = self.left[..., : self.size + 1].sum(-1)
        rows, live = self.rows.reshape(-1), w > 0 if self.used is None else self.used & (w > 0)
        wild = live & (~after.isfinite() | self.given.isnan().any(2))
        self.law.refuse(rows, self.kids[..., 0].reshape(-1), wild.view(-1))
        self.law.miss(rows, self.slots.reshape(-1), self.lawless & live.view(-1))
        return torch.where(after > 0, self.rest / after, 1.0)

    def remains(self, at: Tensor) -> Support:
        """What is left of the laws of the slots `at` [R'], places in [G * I], all tokens of them,
        up to a factor; the law itself where nothing is."""
        ids, size = self.support.ids, self.size
        left = self.left.flatten(0, 1)[at]
        nothing = (self.rest.view(-1)[at] < NOTHING)[:, None]
        probs = self.support.probs[at].to(torch.float64)
        if self.vocab is None:
            return Support(
                None if ids is None else ids[at], torch.where(nothing, probs, left[:, :size])
            )
        outside = self.outside.view(-1)[at]
        share = torch.where(outside > 0, left[:, size] / outside, 0.0)
        shared = (probs * share[:, None]).index_copy_(1, self.vocab, left[:, :size])
        return Support(None, torch.where(nothing, probs, shared))


def _ranks(there: Tensor) -> int:
    """The most children that a slot has, [G, I, C] bool; C where asking is not free."""
    return int(there.any(1).sum()) if waits.free(there) else there.shape[2]


def rejection(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """Top-down recursive rejection; needs the target's law only where the walk goes."""
    path, length, bonus, rows, slots = _start(tree)
    for level in range(tree.layout.levels + 1):
        chosen = torch.full_like(rows, -1)
        siblings = None
        if level < tree.layout.levels:
            siblings = Siblings(tree, law, rows[None], slots[None])
            certain = torch.ones(1, len(rows), dtype=torch.float64, device=rows.device)
            ranks = _ranks(siblings.there)
            chances = siblings.judge(slice(None), certain, max(1, ranks))[0]
            siblings.close()
            kids, there = siblings.kids[0], siblings.there[0]
            for j in range(ranks):
                trying = there[:, j] & (chosen < 0)
                chance = torch.where(trying, chances[:, j], 1.0)
                accepted = rng.accept(chance, rows, kids[:, j]) & trying
                chosen = torch.where(accepted, kids[:, j], chosen)
        stay = chosen < 0
        end = stay.nonzero()[:, 0]
        if end.numel():  # at the last level nobody walks on
            last = siblings.remains(end) if siblings else law.at(rows, slots)
            bonus[rows[end]] = last.token(rng.draw(last.probs, rows[end], slots[end] - 1))
        rows, node = rows[~stay], chosen[~stay]
        if rows.numel() == 0:
            break
        path[rows, level] = node
        length[rows] += 1
        slots = node + 1
    return Verdict(path, length, bonus)


def traversal(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """Leaf to root. A slot is accepted with the probability w that is left to it after all its
    children failed.

    Neither w nor the residual depends on a coin, so both are computed for every slot, one
    level and one sibling rank at a time; then the first slot in post-order whose own coin
    falls below its w ends the path. Laws are needed where children hang (a leaf's only if it
    ends the path) and, where asking is free, only below slots that can be reached at all (w >
    0): elsewhere those of all levels are made at once.
    """
    count, n = tree.tokens.shape
    device, layout = tree.tokens.device, tree.layout
    every = torch.arange(count, device=device)
    whole = torch.zeros(count, n + 2, dtype=torch.float64, device=device)
    carried, nowhere = whole[:, : n + 1], n + 1
    carried[:, 0] = 1
    present = torch.arange(n + 1, device=device) <= tree.size[:, None]
    groups: list[Siblings] = []

    def judge(siblings: Siblings, part: slice, ranks: int) -> None:
        rows, slots = siblings.rows[:, part], siblings.slots[:, part]
        chance = siblings.judge(part, whole[rows, slots], ranks)
        whole[rows[..., None], siblings.below[:, part, :ranks]] = chance

    def close(siblings: Siblings) -> None:
        slots, used = siblings.slots, siblings.used
        slots = slots if used is None else torch.where(used, slots, nowhere)
        whole[siblings.rows, slots] = siblings.close()
        groups.append(siblings)

    inner = None if waits.free(carried) else layout.inner
    if inner is None:
        for level in range(layout.levels):
            rows, slots = _parents(tree, level, present & (carried > 0))
            if rows.numel() == 0:
                break
            siblings = Siblings(tree, law, rows[None], slots[None])
            judge(siblings, slice(None), _ranks(siblings.there))
            close(siblings)
    elif inner.spans:
        siblings = Siblings(tree, law, *unasked.slots_of(tree, inner.slots, present))
        for start, stop, ranks in inner.spans:
            judge(siblings, slice(start, stop), ranks)
        close(siblings)
    carried[:, 0] = 1  # the root never rejects; rounding must not either
    order = layout.postorder.expand(count, n + 1)
    end = order.gather(1, rng.first(carried.gather(1, order), every, order - 1)[:, None])[:, 0]
    path = layout.paths.expand(count, -1, -1)[every, end]
    bonus = (_bonus if inner is None else unasked.bonus)(law, rng, end, groups)
    return Verdict(path, (path >= 0).sum(1), bonus)


def _parents(tree: DraftTree, level: int, live: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and slots [R] of a level that have children. live: [B, N + 1] bool, which can be
    reached."""
    layout = tree.layout
    depth = torch.cat([layout.depth.new_full((len(layout.depth), 1), -1), layout.depth], 1)
    rows, slots = ((depth == level - 1) & live).nonzero(as_tuple=True)
    _, there = children(tree, rows, slots)
    inner = there[:, 0].nonzero()[:, 0]
    return rows[inner], slots[inner]


def _bonus(law: Law, rng: Coins, end: Tensor, groups: list[Siblings]) -> Tensor:
    """The token after slot `end` [B]: from the residual where its children failed, from the
    law at a leaf.
    """
    bonus = torch.zeros_like(end)
    leaf = torch.ones_like(end, dtype=torch.bool)
    for siblings in groups:
        hit = (end[siblings.rows[0]] == siblings.slots[0]).nonzero()[:, 0]
        if hit.numel():
            chosen, rows = siblings.remains(hit), siblings.rows[0, hit]
            bonus[rows] = chosen.token(rng.draw(chosen.probs, rows, end[rows] - 1))
            leaf[rows] = False
    rows = leaf.nonzero()[:, 0]
    if rows.numel():
        support = law.at(rows, end[rows])
        bonus[rows] = support.token(rng.draw(support.probs, rows, end[rows] - 1))
    return bonus


RULES = {"rejection": rejection, "traversal": traversal}
