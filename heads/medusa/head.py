"""Medusa heads (Cai et al. 2024): K small heads on the target's last feature, each guessing
one token further ahead.

Head i (0-based) reads f_t, the target's output feature after its final norm at position t, and
predicts x_{t+i+2}; the target's own LM head predicts x_{t+1} from the same feature. A head is
L residual blocks x + SiLU(W x + b) and a vocabulary projection. W = 0, b = 0 and a projection
copied from the LM head make every fresh head equal the LM head.

Markov term (markov_rank = r > 0; the idea is DSpark's): every head's logits for token x_s get
W1[x_{s-1}] W2 added, W1 [V, r], W2 [r, Vd], shared by the heads. Training reads the true
previous token, drafting the drafted one, so a draft is made level by level. W2 starts at 0: a
fresh head still equals the LM head. Trained by train/medusa.py; conf/head/medusa.yaml holds
the keys.

Shape letters: B rows, T positions, D width, K heads, L blocks, Vd draft vocabulary, n
supervised tokens, r rank, P nodes of one level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.decode.drafters import Drafter
from outrider.decode.grow import Form, Nodes
from outrider.decode.target import Target
from outrider.heads.batch import Batch
from outrider.heads.medusa.base import ParallelHead, ParallelSaved, residual_blocks
from outrider.heads.medusa.config import MedusaConfig
from outrider.heads.medusa.drafter import AtOnce
from outrider.heads.names import DraftSpec

__all__ = ["MedusaConfig", "MedusaDrafter", "MedusaHead"]


@dataclass(kw_only=True)
class MedusaSaved(ParallelSaved):
    config: MedusaConfig


class MedusaHead(ParallelHead):
    """K Medusa heads as stacked tensors: block_weight [K, L, D, D], block_bias [K, L, D],
    markov_in [V, r] and markov_out [Vd, r] (None without a Markov term); the rest as in
    ParallelHead."""

    kind = "medusa"
    Config = MedusaConfig
    Saved: ClassVar[type[MedusaSaved]] = MedusaSaved
    cfg: MedusaConfig
    markov_in: nn.Parameter | None
    markov_out: nn.Parameter | None

    def make(self, device: torch.device | str | None) -> None:
        cfg, width, vocab_size = self.cfg, self.width, self.vocab_size
        self.block_weight = nn.Parameter(
            torch.zeros(cfg.heads, cfg.blocks, width, width, device=device)
        )
        self.block_bias = nn.Parameter(torch.zeros(cfg.heads, cfg.blocks, width, device=device))
        self.markov_in = self.markov_out = None
        if rank := cfg.markov_rank:
            # Unit rows on the token's side: what the zero side learns from is then of one size
            # for all tokens.
            rows = F.normalize(torch.randn(vocab_size, rank, device=device), dim=-1)
            self.markov_in = nn.Parameter(rows)
            size = cfg.draft_vocab or vocab_size
            self.markov_out = nn.Parameter(torch.zeros(size, rank, device=device))

    def states(self, batch: Batch, target: Target, feats: Tensor, reads: Tensor) -> Tensor:
        return residual_blocks(feats[reads], self.block_weight, self.block_bias)

    def low_rank(self, batch: Batch, flat: Tensor) -> tuple[Tensor, Tensor] | None:
        """Look up the Markov term: the token before a supervised one is the same for all
        heads, so m W2 is computed once."""
        if self.markov_in is None or self.markov_out is None:
            return None
        return F.embedding(batch.ids.reshape(-1)[flat - 1], self.markov_in), self.markov_out

    def drafter(self, target: Target, draft: DraftSpec | None = None) -> Drafter:
        kind = MedusaDrafter if self.markov_in is None else MarkovDrafter
        return kind(self, target, self.form(target, draft))


class MedusaDrafter(AtOnce):
    """Drafts with all heads at once."""

    def __init__(self, head: MedusaHead, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        given = head.block_weight, head.block_bias
        self.weight, self.bias = (t.detach().to(target.dtype, copy=True) for t in given)

    def logits(self, depth: int) -> Tensor:
        x = self.feats.expand(depth, *self.feats.shape)
        x = residual_blocks(x, self.weight[:depth], self.bias[:depth])
        if self.proj.dim() == 2:
            return x @ self.proj.T
        return torch.bmm(x, self.proj[:depth].transpose(1, 2))


class MarkovDrafter(MedusaDrafter):
    """Medusa with a low-rank term of the token before."""

    def __init__(self, head: MedusaHead, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        assert head.markov_in is not None and head.markov_out is not None
        self.markov_in = head.markov_in.detach().to(target.dtype, copy=True)
        self.markov_out = head.markov_out.detach().to(target.dtype, copy=True)

    def open(self, levels: int) -> Tensor:
        return super().open(levels) + self._after(self.last[:, None])

    def level(self, nodes: Nodes) -> Tensor:
        return super().level(nodes) + self._after(nodes.tokens)

    def _after(self, tokens: Tensor) -> Tensor:
        """The term of tokens [B, P]: [B, P, Vd]."""
        return F.linear(F.embedding(tokens, self.markov_in), self.markov_out)
