"""Draft trees: which tokens a drafter proposes, the parent of each, and what each token was
drawn from.

Shape letters: B rows (sequences), N nodes per row, C most children of one node, D deepest
level, P proposal distributions per row, Vd draft vocabulary. Slot 0 is the last committed
token, slot i + 1 is node i.

A chain is a tree of width one; the empty tree (N = 0) is autoregressive decoding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from dataclasses import field as dataclass_field

import torch
from torch import Tensor

from outrider.decode import devices
from outrider.decode.layout import TreeLayout, TreeShape

__all__ = ["DraftTree", "Proposal", "TreeLayout", "TreeShape"]


@dataclass(frozen=True)
class Proposal:
    """The distributions that sampled nodes were drawn from.

    probs: [B, P, Vd] float32 or float64, each row sums to one.
    row: [B, N] int64, the row of probs of a node's siblings (siblings share it; unused for
        deterministic nodes).
    vocab: [Vd] int64 ascending target ids of the draft vocabulary, None for the whole
        vocabulary.
    replacement: False: a sibling was drawn from the distribution with all earlier siblings removed
        (deterministic ones too), renormalised. True: siblings are independent draws.
    """

    probs: Tensor
    row: Tensor
    vocab: Tensor | None = None
    replacement: bool = False

    def read(self, probs: Tensor, ids: Tensor) -> Tensor:
        """`probs` [R, Vd] read at target `ids` [R, S]; 0 outside the draft vocabulary."""
        place, inside = self.place(ids)
        return torch.where(inside, probs.gather(1, place), 0.0)

    def place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where target `ids` stand in the draft vocabulary (clamped), and whether
        they are in it."""
        if self.vocab is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self.vocab, ids.contiguous()).clamp_(max=self.vocab.numel() - 1)
        return place, self.vocab[place] == ids


@dataclass(frozen=True)
class DraftTree:
    """One draft per row. Rows may differ in size: nodes at or beyond size[b] are padding and
    never read.

    tokens: [B, N] int64. parents: [B, N] int64, parents[b, i] < i, -1 = child of the last
        committed token.
    size: [B] int64. sampled: [B, N] bool, or None when every node is deterministic (its
        proposal is a point mass).
    proposal: what the sampled nodes were drawn from. Siblings stand in draw order: only a
        wholly deterministic tree may be re-ranked, since reordering sampled siblings by value
        biases the output (DSpark, appendix A).
    layout: given by static shapes, derived from the parents otherwise.
    score: [B, N] float, the drafter's own order of a dynamic tree's nodes (cumulative
        log-probability): for tuning. A draft whose score is not finite is refused.
    """

    tokens: Tensor
    parents: Tensor
    size: Tensor
    sampled: Tensor | None = None
    proposal: Proposal | None = None
    static_layout: TreeLayout | None = dataclass_field(default=None, repr=False)
    score: Tensor | None = dataclass_field(default=None, repr=False)

    @functools.cached_property
    def layout(self) -> TreeLayout:
        return self.static_layout or TreeLayout.of(self.parents)

    @property
    def width(self) -> int:
        """N, the padded number of nodes."""
        return self.tokens.shape[1]

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu", drawn: bool = False) -> DraftTree:
        """No draft at all for `rows` rows. drawn: of a drafter that draws. What a union
        adds to it is then verified as beside rows of which something was drawn: a row's
        random numbers, and so its tokens, do not depend on its neighbours."""
        none = torch.empty(rows, 0, dtype=torch.int64, device=device)
        sampled = proposal = None
        if drawn:
            probs = torch.ones(rows, 1, 1, device=device)
            sampled, proposal = none.bool(), Proposal(probs, none, none.new_zeros(1))
        return DraftTree(
            none,
            none,
            torch.zeros(rows, dtype=torch.int64, device=device),
            sampled,
            proposal,
            static_layout=TreeShape.chain(0).layout(torch.device(device)),
        )

    @staticmethod
    def chain(
        tokens: Tensor,
        size: Tensor | None = None,
        sampled: Tensor | None = None,
        proposal: Proposal | None = None,
    ) -> DraftTree:
        """Return a chain of `tokens` [B, N]; size [B] defaults to N."""
        return DraftTree.static(TreeShape.chain(tokens.shape[1]), tokens, size, sampled, proposal)

    @staticmethod
    def static(
        shape: TreeShape,
        tokens: Tensor,
        size: Tensor | None = None,
        sampled: Tensor | None = None,
        proposal: Proposal | None = None,
    ) -> DraftTree:
        """`tokens` [B, N] hung on a shape all rows share; nodes stand level by level, so a row
        is cut by its size.
        """
        rows, n = tokens.shape
        if size is None:
            size = torch.full((rows,), n, dtype=torch.int64, device=tokens.device)
        return DraftTree(
            tokens,
            shape.parents(tokens.device).expand(rows, n),
            devices.send(size, tokens.device),
            sampled,
            proposal,
            static_layout=shape.layout(tokens.device),
        )
