"""What the accept rule reads of a tree: every slot that has children, the target's
distribution there, and what the children were drawn from, as decode/residual.py takes them.

The arithmetic runs on as few columns as it can: all tokens; those of a truncated
distribution and an empty column; or, where the drafter has a draft vocabulary, its tokens,
the siblings that lie outside, and all other tokens as one column, for these only ever keep
their ratios.

Shape letters: B rows, N nodes, R slots that are read together, C siblings, V vocabulary, Vd
draft vocabulary, S columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import devices
from outrider.decode.layout import Places, Run, places
from outrider.decode.residual import NOTHING, Siblings
from outrider.decode.sampling import Distribution, Support
from outrider.decode.tree import DraftTree, Proposal


@dataclass(frozen=True)
class SiblingGroup:
    """Slots that have children, R of them.

    valid: [R, C] bool, which of the children are there; a slot whose first is not is
    nobody's parent, and nothing of it counts. tokens: [R, C] int64 theirs. runs: as of
    `layout.Inner`, among the R. support, undefined: the target's distributions, and where its
    logits make none. vocab: [Vd], where the columns are those of a draft vocabulary.
    """

    places: Places
    valid: Tensor
    tokens: Tensor
    runs: tuple[Run, ...]
    siblings: Siblings
    support: Support
    undefined: Tensor
    vocab: Tensor | None

    def part(self, start: int, stop: int, ranks: int) -> Siblings:
        """Return the slots [start:stop], who have at most `ranks` children."""
        p, q, *of_child = self.siblings
        return Siblings(p[start:stop], q[start:stop], *(t[start:stop, :ranks] for t in of_child))

    def left(self, residual: Tensor, at: Tensor) -> Support:
        """Return what is left of the distributions of the slots `at` [R'] when all their
        children failed, up to a factor; the distribution itself where nothing is. residual:
        [R, S]."""
        residual = residual[at]
        ids, probs = self.support.ids, self.support.probs[at].to(torch.float64)
        left = residual if ids is None else residual[:, :-1]
        if self.vocab is not None:
            outside = self.siblings.p[at, -1:]
            share = torch.where(outside > 0, residual[:, -1:] / outside, 0.0)
            left = (probs * share).index_copy_(1, self.vocab, residual[:, : len(self.vocab)])
            left.scatter_(1, self.tokens[at], 0.0)
        nothing = residual.sum(-1, keepdim=True) < NOTHING
        return Support(None if ids is None else ids[at], torch.where(nothing, probs, left))


def groups(tree: DraftTree, distribution: Distribution, reached: Tensor) -> Iterator[SiblingGroup]:
    """Read all slots of `tree` that have children: in one go, without a host read.

    On a CPU only those that the caller has found to be `reached` [B, N + 2] with a probability
    above 0, run by run."""
    inner, (count, n) = tree.layout.inner, tree.tokens.shape
    asks = devices.on_cpu(reached)
    for runs in [(run,) for run in inner.runs] if asks else [inner.runs]:
        found, parts = places(inner, runs, count, n)
        valid = found.kids < tree.size[found.rows, None]
        if asks:
            here = (valid[:, 0] & (reached.take(found.own) > 0)).nonzero()[:, 0]
            if not len(here):
                return
            if len(here) < len(valid) and len(runs[0]) == 1:
                found, valid = Places(*(t[here] for t in found)), valid[here]
                parts = (((0, len(here), runs[0][0][2]),),)
        yield _read(tree, distribution, found, valid, parts)


def _read(
    tree: DraftTree,
    distribution: Distribution,
    found: Places,
    valid: Tensor,
    runs: tuple[Run, ...],
) -> SiblingGroup:
    proposal, ranks = tree.proposal, valid.shape[1]
    assert proposal is not None and tree.sampled is not None
    support, undefined = distribution.read(found.rows, found.slots)
    # What a draft holds may be anything where it is padding, and where it is refused later. A child
    # that does not exist is placed where its first sibling has left nothing.
    tokens = tree.tokens.take(found.nodes).clamp_(0, distribution.vocab_size - 1)
    if ranks > 1:
        tokens = torch.where(valid, tokens, tokens[:, :1])
    place, known = proposal.place(tokens)
    if proposal.vocab is not None:
        beside = torch.arange(ranks, device=valid.device) + proposal.vocab.numel()
        place = torch.where(known, place, beside)
    # All sampled siblings share one distribution. Deterministic ones need none, and what is in
    # their place is never looked at.
    sampled = tree.sampled.take(found.nodes) & valid
    row = proposal.row.take(found.nodes).masked_fill_(~sampled, 0).amax(1)
    q = proposal.probs[found.rows, row.clamp_(0, proposal.probs.shape[1] - 1)].to(torch.float64)
    q = q if proposal.vocab is None else F.pad(q, (0, ranks + 1))
    q.masked_fill_(~sampled.any(1, keepdim=True), 0.0)
    scale, q_token = _drawn(q, place, sampled, proposal.replacement)
    p, q, column = _on_columns(support, proposal, q, tokens, place, valid & ~known)
    siblings = Siblings(p, q, column, scale, q_token)
    vocab = proposal.vocab if support.ids is None else None
    return SiblingGroup(found, valid, tokens, runs, siblings, support, undefined, vocab)


def _drawn(q: Tensor, place: Tensor, sampled: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    """Return scale and q_token [R, C] of residual.Siblings, whose tokens stand at `place`
    [R, C] in q.

    A distribution that has run out of tokens counts for nothing: its siblings are judged as
    deterministic from there on, which is right for any candidate, also one that was drawn
    from what is next to nothing."""
    mass = q.sum(-1, keepdim=True)
    if not replacement and place.shape[1] > 1:
        # A later draw had the tokens of its earlier siblings removed from its distribution.
        left, masses = q.clone(), [mass]
        for j in range(place.shape[1] - 1):
            left.scatter_(-1, place[..., j, None], 0.0)
            masses.append(left.sum(-1, keepdim=True))
        mass = torch.cat(masses, -1)
    none = (mass < NOTHING) | ~sampled
    scale = mass.reciprocal().masked_fill(none, 0.0)  # NaN stays NaN
    q_token = (q.gather(-1, place) * scale).masked_fill_(none, 1.0)
    return scale, q_token.masked_fill_(q_token < NOTHING, torch.inf)


def _on_columns(
    support: Support,
    proposal: Proposal,
    q: Tensor,
    tokens: Tensor,
    place: Tensor,
    outside: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, q [R, S] and column [R, C] of residual.Siblings. outside: [R, C] bool,
    siblings whose token is not in the draft vocabulary."""
    probs, ids, vocab = support.probs, support.ids, proposal.vocab
    if ids is not None:
        same = ids[:, None] == tokens[..., None]
        column = torch.where(same.any(-1), same.view(torch.uint8).argmax(-1), ids.shape[1])
        q = proposal.read(q[:, : proposal.probs.shape[2]], ids)
        return F.pad(probs, (0, 1)), F.pad(q, (0, 1)), column
    if vocab is None:
        return probs, q, place
    # Summed, not taken as what the others leave of one: that would be noise where it is small.
    rest = probs.index_fill(1, vocab, 0.0).scatter_(1, torch.where(outside, tokens, vocab[0]), 0.0)
    beside = torch.where(outside, probs.gather(1, tokens), 0.0)
    rest = rest.sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat([probs[:, vocab], beside, rest], 1), q, place
