"""Verification: which path of the draft the target accepts, and the bonus token after it.

The rule is traversal verification (Weng et al. 2505.12398), generalised to a distribution q of its
own for every candidate; on a chain it is block verification (Sun et al. 2403.10444). It leaves the
target's distribution unchanged (docs/lossless.md has the proof in a few lines). For one chain of
drafted tokens x_1 .. x_K, q_k what x_k was drawn from and p_k the target's distribution in its
place:

    w_0 = 1,  w_k = min(1, w_k-1 p_k(x_k) / q_k(x_k))      the probability that place k is reached
    left_k = [w_k p_k+1 - q_k+1]+                             what the failure of x_k+1 leaves
    rest_k = sum(left_k) / (sum(left_k) + 1 - w_k)            the path ends behind x_k with it
    the path ends at the largest k with coin_k < rest_k (w_K behind the last token, 1 before the
    first); the bonus token is drawn from left_k, or from p_K+1 behind the last token.

A tree is judged in the same way from its leaves to the root, siblings one after the other:
decode/residual.py is the arithmetic of one level in float64, decode/siblings.py what it reads. A
deterministic candidate has a point mass for q; where all of them are, the rule comes down to
`walk`.

A slot that has no distribution is reported to the `Distribution`, whose `check` refuses the
cycle before anything is committed. `rng` is asked for first(p) and draw(weights) only: an
enumerator in its place walks every branch. Nothing here knows a temperature: T = 0 is a
distribution with one token. The device is asked for nothing; on a CPU, where asking is free,
`walk` reads only what is reached and `_bonus` one distribution a row.

Shape letters: B rows, N nodes, D levels, R slots with children, C siblings, S columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import devices, residual, siblings
from outrider.decode.rng import Coins
from outrider.decode.sampling import Distribution, Support
from outrider.decode.siblings import SiblingGroup
from outrider.decode.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """path: [B, D] int64 accepted node numbers from the top, -1 padded. length: [B]. bonus:
    [B] token ids.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor


def verify(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """Return accepted path and bonus token of every row.

    Ask `distribution.check()` before anything is committed: it raises where there was no
    distribution. What the draft was drawn from is judged by decode/checks.py.
    """
    if tree.sampled is None or tree.proposal is None or not tree.width:
        return walk(tree, distribution, rng)
    return traversal(tree, distribution, rng)


def traversal(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """Leaf to root: a slot is accepted with the probability that is left to it after all its
    children failed.

    Neither that nor the residual depends on a coin, so both are computed for all slots with
    children, from the root down; then the first slot in post-order whose own coin falls below
    its probability ends the path. A leaf's distribution is needed only if it ends the path.
    """
    count, n = tree.tokens.shape
    # By slot, the last column for those that are not there: the probability w that a slot is
    # reached, in whose place comes the one that it ends the path when its turn comes.
    reached = torch.zeros(count, n + 2, dtype=torch.float64, device=tree.tokens.device)
    reached[:, 0] = 1
    at, judged = reached.view(-1), list[tuple[SiblingGroup, Tensor]]()
    for group in siblings.groups(tree, distribution, reached):
        q, own, rest = group.siblings.q, group.places.own, list[Tensor]()
        below = torch.where(group.valid, group.places.below, n + 1)
        left = q.new_empty(len(q), q.shape[1] + 1)
        for run in group.runs:
            for start, stop, _ in run[:-1]:  # one child each: it asks for no residual
                ratio = residual.first_ratio(group.part(start, stop, 1))
                at.put_(below[start:stop, 0], (at.take(own[start:stop]) * ratio).clamp_(max=1))
            start, (_, stop, ranks) = run[0][0], run[-1]
            reach = at.take(own[start:stop])
            step = residual.level(group.part(start, stop, ranks), reach, left[start:stop])
            at.put_(below[start:stop, :ranks], step.accept)
            rest.append(step.rest)
        ends = torch.cat(rest)
        live = group.valid[:, 0] & (at.take(own) > 0)
        distribution.miss(group.places.rows, group.places.slots, live & group.undefined)
        at.put_(torch.where(group.valid[:, 0], own, n + 1), ends)
        judged.append((group, left[:, :-1]))
    reached[:, 0] = 1  # the root never rejects; rounding must not either
    every = torch.arange(count, device=at.device)
    order = tree.layout.postorder.expand(count, n + 1)
    end = order.gather(1, rng.first(reached.gather(1, order), every, order - 1)[:, None])[:, 0]
    return _verdict(tree, end, _bonus(judged, distribution, rng, end))


def _bonus(
    judged: Sequence[tuple[SiblingGroup, Tensor]],
    distribution: Distribution,
    rng: Coins,
    end: Tensor,
) -> Tensor:
    """Return the token [B] after slot `end` [B]: from what is left [R, S] where its
    children failed, from the distribution itself at a leaf."""
    every = torch.arange(len(end), device=end.device)
    if devices.on_cpu(end):
        bonus, leaf = torch.empty_like(end), torch.ones_like(end, dtype=torch.bool)
        for group, residual in judged:
            rows = group.places.rows
            at = ((end.take(rows) == group.places.slots) & group.valid[:, 0]).nonzero()[:, 0]
            if at.numel():
                rows, left = rows[at], group.left(residual, at)
                bonus[rows] = left.token(rng.draw(left.probs, rows, end[rows] - 1))
                leaf[rows] = False
        rows = leaf.nonzero()[:, 0]
        if rows.numel():
            support = distribution.at(rows, end[rows])
            bonus[rows] = support.token(rng.draw(support.probs, rows, end[rows] - 1))
        return bonus
    ((group, residual),) = judged
    here = (end.take(group.places.rows) == group.places.slots) & group.valid[:, 0]
    here = here.view(-1, len(end))
    parent, at = here.any(0)[:, None], here.view(torch.uint8).argmax(0) * len(end) + every
    left, last = group.left(residual, at), distribution.at(every, end)
    short = last.probs.shape[1] - left.probs.shape[1]  # more of one may have been looked at

    def chosen(left: Tensor, last: Tensor) -> Tensor:
        longer = F.pad(left, (0, max(0, short))), F.pad(last, (0, max(0, -short)))
        return torch.where(parent, *longer)

    ids = None if left.ids is None or last.ids is None else chosen(left.ids, last.ids)
    support = Support(ids, chosen(left.probs, last.probs.to(torch.float64)))
    return support.token(rng.draw(support.probs, every, end - 1))


def walk(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """For trees whose candidates are all deterministic: draw a token at a slot, by the slot's own
    number, and step down to the child that is that token. Optimal for such trees: the expected
    length is the sum over nodes of the target's path probability."""
    count, n = tree.tokens.shape
    drawn = tree.tokens.new_full((count, n + 1), -1)
    node, up = torch.arange(n, device=drawn.device), tree.parents + 1
    tokens = torch.where(node < tree.size[:, None], tree.tokens, -2)  # padding is nobody's child
    rows, asks = torch.arange(count, device=node.device), devices.on_cpu(drawn)
    slots = torch.zeros_like(rows)  # the roots, then what is reached
    if not asks:
        rows, slots = rows.repeat_interleave(n + 1), F.pad(node + 1, (1, 0)).repeat(count)
    while True:
        support, undefined = distribution.read(rows, slots)
        drawn[rows, slots] = support.token(rng.draw(support.probs, rows, slots - 1))
        wrong = drawn.gather(1, up) != tokens
        on = ~(tree.layout.mask[:, :, 1:] & wrong[:, None]).any(2)  # drawn, and all above it
        distribution.miss(rows, slots, undefined & on[rows, slots])
        if not asks:
            break
        rows, slots = (on & (drawn < 0)).nonzero(as_tuple=True)
        if not rows.numel():
            break
    end = torch.where(on, tree.layout.positions, -1).argmax(1)
    return _verdict(tree, end, drawn.gather(1, end[:, None])[:, 0])


def _verdict(tree: DraftTree, end: Tensor, bonus: Tensor) -> Verdict:
    """end: [B] the slot at which the path of each row ends."""
    paths = tree.layout.paths.expand(len(end), -1, -1)
    path = paths[torch.arange(len(end), device=end.device), end]
    return Verdict(path, (path >= 0).sum(1), bonus)


@dataclass(frozen=True)
class HostVerdict:
    """A verdict on the host, and its tensors on the device.

    path: [B, D], length: [B] as in Verdict, on the host. proposed: [B] levels drafted. emitted:
    [B][D + 1] the path's tokens, then the bonus token, then padding; tokens: the same on the
    device, [B, D + 1], and slots: [B, D + 1] that each of them was predicted by. doubtful: a row
    holds what must not be committed.
    """

    path: Tensor
    length: Tensor
    proposed: list[int]
    emitted: list[list[int]]
    tokens: Tensor
    slots: Tensor
    doubtful: bool


def to_host(verdict: Verdict, tree: DraftTree, doubtful: Tensor) -> HostVerdict:
    """Return all that the host wants to know of it, in one read. doubtful: [B] bool, rows that
    must not be committed."""
    path = verdict.path.clamp(min=0)
    tokens = tree.tokens.gather(1, path) if tree.width else path
    tokens = F.pad(tokens, (0, 1)).scatter(1, verdict.length[:, None], verdict.bonus[:, None])
    there = torch.arange(tree.width + 1, device=path.device) <= tree.size[:, None]
    proposed = torch.where(there, tree.layout.positions, 0).amax(1)
    columns = [torch.stack([doubtful, verdict.length, proposed], 1), verdict.path, tokens]
    table = torch.cat(columns, 1).cpu()
    head, path, emitted = table.split([t.shape[1] for t in columns], 1)
    return HostVerdict(
        path=path,
        length=head[:, 1],
        proposed=head[:, 2].tolist(),
        emitted=emitted.tolist(),
        tokens=tokens,
        slots=F.pad(verdict.path + 1, (1, 0)),
        doubtful=bool(head[:, 0].any()),
    )
