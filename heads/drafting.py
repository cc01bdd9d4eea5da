"""What the drafters of all trained heads share: their name and form, and the growth of a draft
(decode.grow), for which a subclass says what it guesses.

Shape letters: B live rows, P nodes of a level, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decode import grow
from outrider.decode.grow import Form, Nodes
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.heads.base import Head


class Drafting:
    """See decode.drafters.Drafter, and decode.grow.LevelSource for what is asked of a
    subclass."""

    def __init__(self, head: Head, target: Target, form: Form) -> None:
        self.name, self.form, self.shape = f"{head.kind}@{form.shape}", form, form.shape
        self.taps, self.max_depth, self.max_nodes = head.taps, form.depth, form.nodes
        self.ids, self.device = head.ids(), target.device

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]."""
        return grow.draft(self, self.form, budget, sampling, rng)

    def draft_ids(self) -> Tensor | None:
        """See decode.grow.LevelSource."""
        return self.ids

    def open(self, levels: int) -> Tensor:
        """See decode.grow.LevelSource: [B, 1, Vd]."""
        raise TypeError("a subclass defines it")

    def level(self, nodes: Nodes) -> Tensor:
        """See decode.grow.LevelSource: [B, P, Vd]."""
        raise TypeError("a subclass defines it")
