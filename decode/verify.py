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

Shape letters: B rows, N nodes, C siblings, D levels, R rows in hand, S support size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.errors import UserError
from decode import waits
from decode.sampling import Law, Support
from decode.tree import DraftTree


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
    return int((cumulative > coin * cumulative[-1]).to(torch.uint8).argmax())


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
    """Node numbers [R, C] below `slots` [R] (clamped to be readable) and which of them are
    there.
    """
    table = tree.layout.children
    kids = table[rows if table.shape[0] > 1 else torch.zeros_like(rows), slots]
    return kids.clamp(min=0), (kids >= 0) & (kids < tree.size[rows, None])


def walk(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """For trees whose candidates are all deterministic: sample, then match."""
    path, length, bonus, rows, slots = _start(tree)
    on = torch.ones_like(rows, dtype=torch.bool)  # rows that have walked so far
    for level in range(tree.layout.levels + 1):
        support = law.at(rows, slots)
        token = support.token(rng.draw(support.probs, rows, slots - 1))
        bonus[rows] = torch.where(on, token, bonus[rows])  # rows that walk on overwrite it
        if level == tree.layout.levels:
            break
        kids, there = children(tree, rows, slots)
        match = there & (tree.tokens[rows[:, None], kids] == token[:, None])
        on = on & match.any(1)
        if _nobody(on):
            break
        node = kids.gather(1, match.to(torch.uint8).argmax(1, keepdim=True))[:, 0]
        path[rows, level] = torch.where(on, node, -1)
        length[rows] += on
        slots = torch.where(on, node + 1, slots)
        if waits.free(on):  # elsewhere rows that stay behind cost less than a wait
            rows, slots, on = rows[on], slots[on], on[on]
    return Verdict(path, length, bonus)


# Mass and probability below it are taken for 0, so that no quotient leaves the range of float64.
NOTHING = 1e-300


class Siblings:
    """The children of R slots in draw order, each with its proposal q_j, and what is left of
    the slots' laws as one child after the other fails. All float64.

    What is left of a law is inside / total, [R, S], and outside / total, [R]: together of mass
    one. Usually S is the support of the law and `outside` is 0. A dense law under a draft
    vocabulary that holds all candidates is looked at there alone (S = Vd): the other tokens
    only ever keep their ratios, so their mass says all of them. The next sampled sibling was
    drawn from proposal * scale, [R, Vd]: earlier siblings removed, of mass one.
    """

    def __init__(
        self, tree: DraftTree, law: Law, rows: Tensor, slots: Tensor, kids: Tensor
    ) -> None:
        assert tree.proposal is not None and tree.sampled is not None
        self.law, self.rows, self.kids = law, rows, kids
        self.replacement = tree.proposal.replacement
        self.support = support = law.at(rows, slots)
        self.tokens = tree.tokens[rows[:, None], kids]  # [R, C]
        self.sampled = tree.sampled[rows[:, None], kids]  # [R, C]
        self.place, self.known = tree.proposal.place(self.tokens)
        self.read = functools.partial(
            tree.proposal.read, ids=support.ids, vocab_size=law.vocab_size
        )
        # All sampled siblings share one law row: take it from the first of them. Deterministic
        # ones need none, and what stands in their place is never looked at.
        first = kids.gather(1, self.sampled.to(torch.uint8).argmax(1, keepdim=True))[:, 0]
        law_row = tree.proposal.row[rows, first].clamp(0, tree.proposal.law.shape[1] - 1)
        self.proposal = tree.proposal.law[rows, law_row].to(torch.float64)
        self.proposal.masked_fill_(~self.sampled.any(1)[:, None], 0.0)
        self._rescale_proposal()
        looks = support.ids is None and waits.free(self.known)
        vocab = tree.proposal.vocab if looks else None
        self.vocab = vocab if vocab is not None and bool(self.known.all()) else None
        if self.vocab is None:
            self.inside = support.probs.to(torch.float64)
            self.outside = torch.zeros_like(self.scale)
        else:
            self.inside = support.probs[:, self.vocab].to(torch.float64)
            # Summed, not taken as what the others leave of one: that would be noise where it
            # is small.
            self.outside = support.probs.index_fill(1, self.vocab, 0.0).sum(-1, dtype=torch.float64)
        self.all_outside = self.outside
        self.total = self.inside.sum(-1) + self.outside
        self.sum = (
            self.total + self.scale
        )  # of all that is divided or multiplied here: not finite if any of it is not

    def _rescale_proposal(self) -> None:
        """A law that has run out of tokens counts for nothing: its siblings are judged as
        deterministic from there on, which is right for any candidate, also one that was drawn
        from what is next to nothing."""
        mass = self.proposal.sum(-1)
        self.scale = torch.where(mass < NOTHING, 0.0, 1 / mass)  # NaN stays NaN
        self.sampled = self.sampled & ~(mass < NOTHING)[:, None]

    def chance(self, carried: Tensor, j: int) -> Tensor:
        """carried * p(x_j) / q_j(x_j), at most 1: [R]. A token without proposal mass gives 0.
        carried: [R] float64.
        """
        place, token = self.place[:, j, None], self.tokens[:, j]
        mass = (
            torch.where(self.known[:, j, None], self.proposal.gather(1, place), 0.0)[:, 0]
            * self.scale
        )
        q = torch.where(self.sampled[:, j], mass, 1.0)
        if self.vocab is None:
            p = Support(self.support.ids, self.inside).of(token)
        else:
            p = self.inside.gather(1, place)[:, 0]
        chance = torch.where(q < NOTHING, 0.0, carried * (p / self.total) / q).clamp(max=1)
        self.sum = self.sum + chance
        return chance

    def fail(self, carried: Tensor, j: int, failed: Tensor) -> Tensor:
        """Rows `failed` [R] bool go on with norm([carried * p - q_j]+); returns its sum before
        normalising, [R].

        A candidate that can fail has carried * p(x_j) < q_j(x_j), so its own place is 0
        whatever q_j is, a law or a point mass. A sum of 0 (equal laws, up to rounding) leaves
        nothing to normalise: the rejection that led here had probability 0 and the law is
        kept.
        """
        ids, token = self.support.ids, self.tokens[:, j, None]
        by = (carried / self.total)[:, None]
        inside = self.inside * by
        q = self.proposal if self.vocab is not None else self.read(self.proposal)
        inside.addcmul_(
            q, torch.where(self.sampled[:, j], self.scale, 0.0)[:, None], value=-1
        ).clamp_(min=0)
        if ids is None:
            inside.scatter_(1, token if self.vocab is None else self.place[:, j, None], 0.0)
        else:
            inside.masked_fill_(ids == token, 0.0)
        outside = self.outside * by[:, 0]
        total = inside.sum(-1) + outside
        self.sum = self.sum + total
        total = torch.where(total < NOTHING, 0.0, total)
        changed = failed & (total > 0)
        if waits.free(changed) and bool(changed.all()):
            self.inside, self.outside, self.total = inside, outside, total
        else:
            self.inside = torch.where(changed[:, None], inside, self.inside)
            self.outside = torch.where(changed, outside, self.outside)
            self.total = torch.where(changed, total, self.total)
        self._remove(j)
        return total

    def _remove(self, j: int) -> None:
        """A later draw without replacement had sibling j's token removed from its law."""
        if self.replacement or j + 1 == self.tokens.shape[1]:
            return
        place = self.place[:, j, None]
        kept = torch.where(self.known[:, j, None], 0.0, self.proposal.gather(1, place))
        self.proposal.scatter_(1, place, kept)
        self._rescale_proposal()

    def close(self) -> None:
        """Report what was not finite. Call after the last sibling."""
        self.law.refuse(self.rows, self.kids[:, 0], ~(self.sum + self.scale).isfinite())

    def left(self, at: Tensor) -> Support:
        """What is left of the laws `at` [R'], all tokens of them, up to a factor."""
        ids, inside = self.support.ids, self.inside[at]
        if self.vocab is None:
            return Support(None if ids is None else ids[at], inside)
        all_outside = self.all_outside[at]
        share = torch.where(all_outside > 0, self.outside[at] / all_outside, 0.0)
        probs = self.support.probs[at].to(torch.float64) * share[:, None]
        return Support(None, probs.index_copy_(1, self.vocab, inside))


def _nobody(mask: Tensor) -> bool:
    """True when no row is left, where asking is free: on an accelerator the loop runs on
    rather than wait.
    """
    return waits.free(mask) and not bool(mask.any())


def rejection(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """Top-down recursive rejection; needs the target's law only where the walk goes."""
    path, length, bonus, rows, slots = _start(tree)
    for level in range(tree.layout.levels + 1):
        chosen = torch.full_like(rows, -1)
        siblings = None
        if level < tree.layout.levels:
            kids, there = children(tree, rows, slots)
            siblings = Siblings(tree, law, rows, slots, kids)
            certain = torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
            for j in range(kids.shape[1]):
                trying = there[:, j] & (chosen < 0)
                if _nobody(trying):
                    break
                chance = torch.where(trying, siblings.chance(certain, j), 1.0)
                accepted = rng.accept(chance, rows, kids[:, j]) & trying
                chosen = torch.where(accepted, kids[:, j], chosen)
                failed = trying & ~accepted
                if _nobody(failed):
                    break
                siblings.fail(certain, j, failed)
            siblings.close()
        stay = chosen < 0
        end = stay.nonzero()[:, 0]
        if end.numel():  # at the last level nobody walks on
            last = siblings.left(end) if siblings else law.at(rows, slots)
            bonus[rows[end]] = last.token(rng.draw(last.probs, rows[end], slots[end] - 1))
        rows, node = rows[~stay], chosen[~stay]
        if rows.numel() == 0:
            break
        path[rows, level] = node
        length[rows] += 1
        slots = node + 1
    return Verdict(path, length, bonus)


@dataclass(frozen=True)
class Opened:
    """Slots of one level whose children were judged. rows, slots: [R]. used: [R] bool, False:
    another stands in its place and counts for nothing. left: what their laws are after all
    children failed, of some of them.
    """

    rows: Tensor
    slots: Tensor
    used: Tensor
    left: Callable[[Tensor], Support]


def _parents(tree: DraftTree, level: int, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, slots and `used` (see Opened) of the slots of a level that have children. live: [B,
    N + 1] bool, which can be reached.

    On an accelerator all rows' slots of a shared shape are taken without asking, and of rows that
    differ as many as there may be. Where one is not live the root stands in for it: its law is
    there in any case.
    """
    layout, (count, _) = tree.layout, live.shape
    if waits.free(live) or layout.children.shape[0] > 1 and not layout.room:
        depth = torch.cat([layout.depth.new_full((len(layout.depth), 1), -1), layout.depth], 1)
        rows, slots = ((depth == level - 1) & live).nonzero(as_tuple=True)
        _, there = children(tree, rows, slots)
        inner = there[:, 0].nonzero()[:, 0]
        return rows[inner], slots[inner], torch.ones_like(inner, dtype=torch.bool)
    found = layout.inner[level].expand(count, -1)
    rows = torch.arange(count, device=live.device).repeat_interleave(found.shape[1])
    slots = found.clamp(min=0).reshape(-1)
    used = live[rows, slots] & (found >= 0).reshape(-1)
    return rows, torch.where(used, slots, 0), used


def traversal(tree: DraftTree, law: Law, rng: Coins) -> Verdict:
    """Leaf to root. A slot is accepted with the probability w that is left to it after all its
    children failed.

    Neither w nor the residual depends on a coin, so both are computed for every slot, one
    level and one sibling rank at a time; then the first slot in post-order whose own coin
    falls below its w ends the path. Laws are needed where children hang (a leaf's only if it
    ends the path) and only below slots that can be reached at all (w > 0).
    """
    count, n = tree.tokens.shape
    device = tree.tokens.device
    every = torch.arange(count, device=device)
    whole = torch.zeros(count, n + 2, dtype=torch.float64, device=device)
    carried, nowhere = whole[:, : n + 1], n + 1
    carried[:, 0] = 1
    present = torch.arange(n + 1, device=device) <= tree.size[:, None]
    levels: list[Opened] = []
    for level in range(tree.layout.levels):
        rows, slots, used = _parents(tree, level, present & (carried > 0))
        if rows.numel() == 0:
            break
        kids, there = children(tree, rows, slots)
        there = there & used[:, None]
        siblings, w = Siblings(tree, law, rows, slots, kids), carried[rows, slots]
        for j in range(kids.shape[1]):
            old = there[:, j]
            if _nobody(old):
                break
            whole[rows, torch.where(old, kids[:, j] + 1, nowhere)] = siblings.chance(w, j)
            total = siblings.fail(w, j, old)
            spent = total + 1 - w
            left = torch.where(spent > 0, total / torch.where(spent > 0, spent, 1.0), 1.0)
            w = torch.where(old, left, w)
        siblings.close()
        carried[rows, slots] = w
        levels.append(Opened(rows, slots, used, siblings.left))
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
    return Verdict(path[:, : tree.layout.levels], on_path.sum(-1), _bonus(law, rng, end, levels))


def _bonus(law: Law, rng: Coins, end: Tensor, levels: list[Opened]) -> Tensor:
    """The token after slot `end` [B]: from the residual where its children failed, from the
    law at a leaf.
    """
    if not waits.free(end):
        return _bonus_everywhere(law, rng, end, levels)
    bonus = torch.zeros_like(end)
    leaf = torch.ones_like(end, dtype=torch.bool)
    for level in levels:
        hit = (end[level.rows] == level.slots).nonzero()[:, 0]
        if hit.numel():
            chosen, rows = level.left(hit), level.rows[hit]
            bonus[rows] = chosen.token(rng.draw(chosen.probs, rows, end[rows] - 1))
            leaf[rows] = False
    rows = leaf.nonzero()[:, 0]
    if rows.numel():
        support = law.at(rows, end[rows])
        bonus[rows] = support.token(rng.draw(support.probs, rows, end[rows] - 1))
    return bonus


def _bonus_everywhere(law: Law, rng: Coins, end: Tensor, levels: list[Opened]) -> Tensor:
    """`_bonus` without a question to the device: what is left is laid side by side for all
    levels, and every row draws from the one where its path ends.
    """
    every = torch.arange(len(end), device=end.device)
    supports: list[Support] = []
    ending: list[Tensor] = []
    for level in levels:
        hit = level.used & (end[level.rows] == level.slots)
        place = torch.where(hit, torch.arange(len(hit), device=end.device), -1)
        at = torch.full_like(end, -1).scatter_reduce_(0, level.rows, place, "amax")
        supports.append(level.left(at.clamp(min=0)))
        ending.append(at >= 0)
    supports.append(law.at(every, end))
    ending.append(torch.ones_like(end, dtype=torch.bool))  # at a leaf, if at no level before
    which = torch.stack(ending).to(torch.uint8).argmax(0)
    width = max(support.probs.shape[1] for support in supports)

    def here(tables: list[Tensor]) -> Tensor:
        """The row of the level where each path ends; [R, S] of all levels -> [B, S]."""
        wide = [F.pad(table, (0, width - table.shape[1])) for table in tables]
        return torch.stack(wide)[which, every]

    ids = [support.ids for support in supports if support.ids is not None]
    probs = here([support.probs.to(torch.float64) for support in supports])
    chosen = Support(here(ids) if ids else None, probs)
    return chosen.token(rng.draw(probs, every, end - 1))


RULES = {"rejection": rejection, "traversal": traversal}
