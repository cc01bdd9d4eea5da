"""Drafters of parallel heads (decode.grow draws the draft): K heads on the feature that
predicted the last committed token.

Medusa's heads look at no drafted token, so all levels are known at once. Its Markov term and
Hydra heads (heads/parallel/hydra_heads.py) read the tokens of a node's own path: the children
of a node come from its own logits.

Shape letters: B live rows, D width, K heads, L blocks, Vd draft vocabulary, P nodes of one
level.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decode import grow, waits
from decode.grow import Form, Nodes
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree


class Guesses(Protocol):
    """What a drafter reads of a head (heads/parallel/base.py). width: D. proj: [K, Vd, D],
    None: the target's LM head.
    """

    kind: ClassVar[str]
    taps: tuple[int, ...]
    width: int
    proj: Any

    def ids(self) -> Tensor | None: ...
    def projection(self, target: Target) -> Tensor: ...


class Blocks(Guesses, Protocol):
    """Medusa's own (heads/parallel/medusa.py): block_weight [K, L, D, D], block_bias [K, L,
    D], the Markov term or None.
    """

    block_weight: Any
    block_bias: Any
    markov_in: Any
    markov_out: Any


class LastFeature:
    """What all keep of a row: the feature that predicted its last committed token (`feats`
    [B, D]) and that token (`last` [B]). See decode.drafters.Drafter."""

    def __init__(self, head: Guesses, target: Target, form: Form) -> None:
        self.name, self.kind = f"{head.kind}@{form.shape}", head.kind
        self.form, self.shape, self.taps = form, form.shape, head.taps
        self.max_nodes, self.max_depth = form.nodes, form.depth
        self.vocab, self.device = head.ids(), target.device
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
            raise ValueError(f"{self.kind} drafts from the target's features; none were given")
        host = torch.stack([torch.arange(len(n)), (n - 1).clamp(min=0)])
        row, at = waits.sent(host, self.device).unbind(0)
        newest, last = feats[row, at, 0].to(self.feats.dtype), tokens[row, at]
        if not bool((n > 0).all()):
            news = waits.sent(n, self.device) > 0
            newest = torch.where(news[:, None], newest, self.feats[rows])
            last = torch.where(news, last, self.last[rows])
        self.feats[rows], self.last[rows] = newest, last

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order."""
        self.feats, self.last = self.feats[rows], self.last[rows]

    def draft_ids(self) -> Tensor | None:
        """See decode.grow.Source."""
        return self.vocab

    def open(self, levels: int) -> Tensor:
        """See decode.grow.Source."""
        raise TypeError("a subclass defines it")

    def level(self, nodes: Nodes) -> Tensor:
        """See decode.grow.Source."""
        raise TypeError("a subclass defines it")

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]."""
        return grow.draft(self, self.form, budget, sampling, rng)


class AtOnce(LastFeature):
    """Heads that read the last feature alone, so that all levels are known at once."""

    def logits(self, depth: int) -> Tensor:
        """[depth, B, Vd]: head i's guess at the token i + 1 after the last committed one."""
        raise TypeError("a subclass defines it")

    def at_once(self, levels: int) -> Tensor | None:
        """See decode.grow.Source."""
        return self.logits(levels).transpose(0, 1)

    def open(self, levels: int) -> Tensor:
        """See decode.grow.Source."""
        self.known = self.logits(levels)
        return self.known[0][:, None]

    def level(self, nodes: Nodes) -> Tensor:
        """See decode.grow.Source: the same for all nodes of a level."""
        return self.known[nodes.level][:, None]


class MedusaDrafter(AtOnce):
    """Medusa's."""

    def __init__(self, head: Blocks, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        depth = form.depth
        self.weight = head.block_weight.detach()[:depth].to(target.dtype, copy=True).transpose(2, 3)
        self.bias = head.block_bias.detach()[:depth, :, None].to(target.dtype, copy=True)

    def logits(self, depth: int) -> Tensor:
        """See AtOnce."""
        x = self.feats.expand(depth, *self.feats.shape)
        for layer in range(self.weight.shape[1]):
            x = x + F.silu(torch.baddbmm(self.bias[:depth, layer], x, self.weight[:depth, layer]))
        return (
            x @ self.proj.T
            if self.proj.dim() == 2
            else torch.bmm(x, self.proj[:depth].transpose(1, 2))
        )


class MarkovDrafter(MedusaDrafter):
    """Medusa with a low-rank term of the token before."""

    def __init__(self, head: Blocks, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        assert head.markov_in is not None and head.markov_out is not None
        self.markov_in = head.markov_in.detach().to(target.dtype, copy=True)
        self.markov_out = head.markov_out.detach().to(target.dtype, copy=True)

    def at_once(self, levels: int) -> Tensor | None:
        """See decode.grow.Source: a level reads the tokens before it."""
        return None

    def open(self, levels: int) -> Tensor:
        """See decode.grow.Source."""
        return super().open(levels) + self._after(self.last[:, None])

    def level(self, nodes: Nodes) -> Tensor:
        """See decode.grow.Source."""
        return super().level(nodes) + self._after(nodes.tokens)

    def _after(self, tokens: Tensor) -> Tensor:
        """The term of tokens [B, P]: [B, P, Vd]."""
        return F.linear(F.embedding(tokens, self.markov_in), self.markov_out)
