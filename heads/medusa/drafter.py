"""Drafters of parallel heads (decode.grow draws the draft): K heads on the feature that
predicted the last committed token.

Medusa's heads (heads/medusa/head.py) look at no drafted token, so all levels are known at
once. Its Markov term and Hydra heads (heads/medusa/hydra_heads.py) read the tokens of a
node's own path: the children of a node come from its own logits.

Shape letters: B live rows, D width, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decode import devices
from outrider.decode.grow import Form, Nodes
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Drafting
from outrider.heads.medusa.base import ParallelHead


class LastFeature(Drafting):
    """What all keep of a row: the feature that predicted its last committed token (`feats`
    [B, D]) and that token (`last` [B])."""

    def __init__(self, head: ParallelHead, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        proj = head.projection(target).detach().to(target.dtype, copy=head.proj is not None)
        self.proj = proj[: form.depth] if proj.dim() == 3 else proj
        self.feats = torch.zeros(0, head.width, dtype=target.dtype, device=target.device)
        self.last = torch.zeros(0, dtype=torch.int64, device=target.device)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget every row."""
        self.feats, self.last = self.feats[:0], self.last[:0]

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append a row for each prompt; its feature comes with the first observe."""
        self.feats = torch.cat(
            [self.feats, self.feats.new_zeros(len(prompts), self.feats.shape[1])]
        )
        self.last = torch.cat([self.last, self.last.new_zeros(len(prompts))])

    def observe(
        self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice = slice(None)
    ) -> None:
        """Keep the feature that predicted the last committed token of each row; tokens [B,
        n_max], feats [B, n_max, 1, D], n [B] on the host (a row with n = 0 keeps what it
        has)."""
        if feats is None:
            raise ValueError(f"{self.name} drafts from the target's features; none were given")
        host = torch.stack([torch.arange(len(n)), (n - 1).clamp(min=0)])
        row, at = devices.send(host, self.device).unbind(0)
        newest, last = feats[row, at, 0].to(self.feats.dtype), tokens[row, at]
        if not bool((n > 0).all()):
            news = devices.send(n, self.device) > 0
            newest = torch.where(news[:, None], newest, self.feats[rows])
            last = torch.where(news, last, self.last[rows])
        self.feats[rows], self.last[rows] = newest, last

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order."""
        self.feats, self.last = self.feats[rows], self.last[rows]


class AtOnce(LastFeature):
    """Heads that read the last feature alone, so that all levels are known at once."""

    def logits(self, depth: int) -> Tensor:
        """[depth, B, Vd]: head i's guess at the token i + 1 after the last committed one."""
        raise TypeError("a subclass defines it")

    def open(self, levels: int) -> Tensor:
        self.known = self.logits(levels)
        return self.known[0][:, None]

    def level(self, nodes: Nodes) -> Tensor:
        return self.known[nodes.level][:, None]  # the same for all nodes of a level
