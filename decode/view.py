"""Distributions on few columns, as the residual is computed: every token, those of a truncated
support, or the draft vocabulary and all other tokens as one.

Shape letters: R rows in hand, S support size, Vd draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode.residual import NOTHING
from outrider.decode.sampling import Support


@dataclass(frozen=True)
class View:
    """`support` [R] on its own columns: p [R, V], or [R, S + 1] where it names its tokens, with a
    last column for those of no probability."""

    support: Support
    p: Tensor

    @staticmethod
    def of(support: Support) -> View:
        return View(support, support.probs if support.ids is None else F.pad(support.probs, (0, 1)))

    def all_tokens(self, residual: Tensor, rows: Tensor, probs: Tensor) -> Tensor:
        """`residual` [R', columns] of the distributions `rows` [R'], at the tokens of `support`,
        where they are `probs`."""
        return residual if self.support.ids is None else residual[:, :-1]

    def remains(self, residual: Tensor, rows: Tensor) -> Support:
        """What is left of the distributions `rows` [R'], up to a factor: `residual` [R', columns];
        the distribution itself where nothing is."""
        ids, probs = self.support.ids, self.support.probs[rows].to(torch.float64)
        nothing = residual.sum(-1, keepdim=True) < NOTHING
        left = torch.where(nothing, probs, self.all_tokens(residual, rows, probs))
        return Support(None if ids is None else ids[rows], left)


@dataclass(frozen=True)
class DraftView(View):
    """A dense support on the draft vocabulary `vocab` [Vd] that holds all candidates: p [R, Vd +
    1]. All other tokens only ever keep their ratios, so their mass, the last column, says all of
    them."""

    vocab: Tensor

    @staticmethod
    def on(support: Support, vocab: Tensor) -> DraftView:
        # Summed, not taken as what the others leave of one: that would be noise where it is small.
        outside = support.probs.index_fill(1, vocab, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        p = torch.cat([support.probs[:, vocab], outside], 1)
        return DraftView(support, p, vocab)

    def all_tokens(self, residual: Tensor, rows: Tensor, probs: Tensor) -> Tensor:
        """See View."""
        outside, left = self.p[rows, -1:], residual[:, -1:]
        share = torch.where(outside > 0, left / outside, 0.0)
        return (probs * share).index_copy_(1, self.vocab, residual[:, :-1])
