"""Medusa heads (Cai et al. 2024): K small heads on the target's last feature, each guessing
one token further ahead by L residual blocks x + SiLU(W x + b) and a vocabulary projection. W =
0, b = 0 and a projection copied from the LM head make every fresh head equal the LM head.

Markov term (markov_rank = r > 0; the idea is DSpark's): every head's logits for token x_s get
W1[x_{s-1}] W2 added, W1 [V, r], W2 [r, Vd], shared by the heads. Training reads the true
previous token, drafting the drafted one, level by level. W2 starts at 0.

Shape letters: B rows, T positions, D width, K heads, L blocks, Vd draft vocabulary, n
supervised tokens, r rank, P nodes of one level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.decode.grow import Form, Nodes
from outrider.decode.target import Target
from outrider.heads.batch import Batch
from outrider.heads.medusa.base import AtOnce, ParallelHead, ParallelSaved, residual_blocks
from outrider.heads.medusa.config import MedusaConfig as MedusaConfig


@dataclass(kw_only=True)
class MedusaSaved(ParallelSaved):
    config: MedusaConfig


class MedusaDrafter(AtOnce):
    """Drafts with all heads at once; with a Markov term level by level, whose tokens it
    reads."""

    def __init__(self, head: MedusaHead, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        given = head.block_weight, head.block_bias
        self.weight, self.bias = (t.detach().to(target.dtype, copy=True) for t in given)
        self.markov = None
        if head.markov_in is not None and head.markov_out is not None:
            given = head.markov_in, head.markov_out
            self.markov = [t.detach().to(target.dtype, copy=True) for t in given]

    def logits(self, depth: int) -> Tensor:
        x = self.feats.expand(depth, *self.feats.shape)
        x = residual_blocks(x, self.weight[:depth], self.bias[:depth])
        if self.proj.dim() == 2:
            return x @ self.proj.T
        return torch.bmm(x, self.proj[:depth].transpose(1, 2))

    def open(self, levels: int) -> Tensor:
        return self._behind(self.last[:, None], super().open(levels))

    def level(self, nodes: Nodes) -> Tensor:
        return self._behind(nodes.tokens, super().level(nodes))

    def _behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Add the Markov term of tokens [B, P] to logits [B, 1, Vd]: [B, P, Vd]."""
        if self.markov is None:
            return logits
        return logits + F.linear(F.embedding(tokens, self.markov[0]), self.markov[1])


class MedusaHead(ParallelHead):
    """K Medusa heads as stacked tensors: block_weight [K, L, D, D], block_bias [K, L, D],
    markov_in [V, r] and markov_out [Vd, r] (None without a Markov term); the rest as in
    ParallelHead."""

    kind = "medusa"
    Config, Saved, Drafts = MedusaConfig, MedusaSaved, MedusaDrafter
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
