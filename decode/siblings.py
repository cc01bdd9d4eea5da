"""What verification reads of a tree: slots with their children, the target's distributions after
them, and what the children were drawn from, as decode/residual.py takes them.

Shape letters: `..` slots that are read together, R of them flattened, C siblings, V vocabulary, Vd
draft vocabulary, S columns of a view: all tokens, those of a truncated support and one for the
rest, or those of the draft vocabulary and one for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import devices
from outrider.decode.residual import NOTHING, Siblings
from outrider.decode.sampling import Distribution, Support
from outrider.decode.tree import DraftTree, Proposal
from outrider.decode.view import DraftView, View


@dataclass(frozen=True)
class Family:
    """Slots that have children. rows, slots: [..]. kids: [.., C] their children in draw order,
    clamped to be readable. valid: [.., C] which of them are there; a slot whose eldest is not is
    nobody's parent, and nothing of it counts. below: [.., C] the slots of the children, N + 1
    where none is. undefined: [..] where the target's logits make no distribution. view: of all
    slots that were read together, flattened.
    """

    rows: Tensor
    slots: Tensor
    kids: Tensor
    valid: Tensor
    below: Tensor
    undefined: Tensor
    siblings: Siblings
    view: View

    def part(self, start: int, stop: int, ranks: int) -> Family:
        """The slots [:, start:stop], who have at most `ranks` children, to be judged."""
        here = slice(start, stop)
        p, q, *of_child = self.siblings
        siblings = Siblings(p[:, here], q[:, here], *(t[:, here, :ranks] for t in of_child))
        rows, slots, below = self.rows[:, here], self.slots[:, here], self.below[:, here, :ranks]
        return replace(self, rows=rows, slots=slots, below=below, siblings=siblings)

    def report(self, distribution: Distribution, reach: Tensor, rest: Tensor) -> None:
        """Note the slots where a distribution or a chance is not finite: `distribution.check`
        refuses the cycle then. reach: [..] float64, those with 0 were not reached. rest: as in
        `LevelVerdict`."""
        live = self.valid[..., 0] & (reach > 0)
        wild = live & ~(rest.isfinite() & ~self.siblings.q_token.isnan().any(-1))
        rows = self.rows.reshape(-1)
        distribution.refuse(rows, self.kids[..., 0].reshape(-1), wild.reshape(-1))
        distribution.miss(rows, self.slots.reshape(-1), (self.undefined & live).reshape(-1))

    def remains(self, residual: Tensor, at: Tensor) -> Support:
        """What is left of the distributions of the slots `at` [R], numbers in `..` flattened.
        residual: [.., S]."""
        return self.view.remains(residual.flatten(0, -2)[at], at)


def read(
    tree: DraftTree,
    distribution: Distribution,
    rows: Tensor,
    slots: Tensor,
    kids: Tensor,
    valid: Tensor,
) -> Family:
    """The slots [..] of `rows` [..] with their children `kids` [.., C], those that are `valid`."""
    proposal, kids = tree.proposal, kids.clamp(min=0)
    assert proposal is not None
    support, undefined = distribution.read(rows.reshape(-1), slots.reshape(-1))
    # What a draft holds may be anything where it is padding, and where it is refused later.
    tokens = tree.tokens[rows[..., None], kids].clamp_(0, distribution.vocab_size - 1)
    place, known = proposal.place(tokens)
    q, scale, q_token = _drawn_from(tree, proposal, rows, kids, valid, place, known)
    view, q, column = _on_columns(support, proposal, q, tokens, place, known, valid)
    # A child that is not there stands where its eldest sibling has left nothing.
    column = torch.where(valid, column, column[..., :1])
    p = view.p.view(*rows.shape, -1)
    siblings = Siblings(p, q, column, scale, q_token)
    below = torch.where(valid, kids + 1, tree.width + 1)
    undefined = undefined.view(rows.shape)
    return Family(rows, slots, kids, valid, below, undefined, siblings, view)


def _on_columns(
    support: Support,
    proposal: Proposal,
    q: Tensor,
    tokens: Tensor,
    place: Tensor,
    known: Tensor,
    valid: Tensor,
) -> tuple[View, Tensor, Tensor]:
    """A view of `support` [R], `q` on its columns [.., S], and the columns of `tokens` [.., C]. q:
    [.., Vd + 1]. place, known: where the tokens stand in the draft vocabulary, if they do. A dense
    support is looked at on a draft vocabulary that holds all candidates, where asking is free."""
    if support.ids is not None:
        row = support.ids.view(*tokens.shape[:-1], 1, -1)
        same = row == tokens[..., None]
        column = torch.where(same.any(-1), same.view(torch.uint8).argmax(-1), row.shape[-1])
        own = proposal.read(q[..., :-1].flatten(0, -2), support.ids, 0)
        return View.of(support), F.pad(own, (0, 1)).view(*q.shape[:-1], -1), column
    if proposal.vocab is None:
        return View.of(support), q[..., :-1], tokens
    if devices.on_cpu(known) and bool((known | ~valid).all()):
        return DraftView.on(support, proposal.vocab), q, place
    size = support.probs.shape[1]
    own = proposal.read(q[..., :-1].flatten(0, -2), None, size)
    return View.of(support), own.view(*q.shape[:-1], -1), tokens


def _drawn_from(
    tree: DraftTree,
    proposal: Proposal,
    rows: Tensor,
    kids: Tensor,
    valid: Tensor,
    place: Tensor,
    known: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [.., Vd + 1], whose last column is 0, scale and q_token [.., C] of residual.Siblings.

    A distribution that has run out of tokens counts for nothing: its siblings are judged as
    deterministic from there on, which is right for any candidate, also one that was drawn from what
    is next to nothing."""
    assert tree.sampled is not None
    sampled = tree.sampled[rows[..., None], kids] & valid
    # All sampled siblings share one distribution: take it from the first of them. Deterministic
    # ones need none, and what stands in their place is never looked at.
    first = kids.gather(-1, sampled.view(torch.uint8).argmax(-1, keepdim=True))[..., 0]
    probs_row = proposal.row[rows, first].clamp(0, proposal.probs.shape[1] - 1)
    size = proposal.probs.shape[2]
    q = proposal.probs.new_empty(*rows.shape, size + 1, dtype=torch.float64)
    q[..., :size], q[..., size] = proposal.probs[rows, probs_row], 0.0
    q.masked_fill_(~sampled.any(-1, keepdim=True), 0.0)
    mass = q.sum(-1, keepdim=True)
    if not proposal.replacement and kids.shape[-1] > 1:
        # A later draw had the tokens of its elder siblings removed from its distribution.
        left, gone, masses = q.clone(), torch.where(known, place, size), [mass]
        for j in range(kids.shape[-1] - 1):
            left.scatter_(-1, gone[..., j, None], 0.0)
            masses.append(left.sum(-1, keepdim=True))
        mass = torch.cat(masses, -1)
    sampled = sampled & ~(mass < NOTHING)
    scale = torch.where(sampled, mass.reciprocal(), 0.0)  # NaN stays NaN
    drawn = torch.where(known, q.gather(-1, place), 0.0) * scale
    q_token = torch.where(sampled, drawn, 1.0)
    return q, scale, q_token.masked_fill_(q_token < NOTHING, torch.inf)
