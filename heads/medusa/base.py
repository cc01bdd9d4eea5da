"""What Medusa and Hydra heads share: K heads on the target's last feature, one draft
vocabulary, one loss, one tree.

Head i (0-based) at position t predicts x_{t+i+2}; the target's own LM head predicts x_{t+1}
from the same feature f_t, taken after its final norm. A subclass says how head i comes from
f_t to its hidden state (`states`); from there on all is the same: a vocabulary projection that
starts as the LM head's rows, the chunked loss, calibration on held-out rows.

Shape letters: B rows, T positions, D width, K heads, Vd draft vocabulary, n supervised tokens,
r low rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from outrider.decode.target import Target
from outrider.heads import losses, vocab
from outrider.heads.base import Head, HeadConfig
from outrider.heads.batch import Batch, LossOut
from outrider.heads.losses import Taught, chunk_of, chunked_loss
from outrider.heads.medusa.config import ParallelConfig as ParallelConfig
from outrider.heads.medusa.saved import ParallelSaved
from outrider.heads.teacher import target_distribution


class ParallelHead(Head):
    """Base of K heads. proj: [K, Vd, D] (absent with share_lm_head). d2t: [Vd] int64 offsets
    of the draft vocabulary (the identity map is not stored)."""

    Config: ClassVar[type[HeadConfig]] = ParallelConfig
    Saved: ClassVar[type[ParallelSaved]] = ParallelSaved
    packs: ClassVar[bool] = True
    rate_narrows: ClassVar[bool] = False
    proj: nn.Parameter | None

    def __init__(
        self,
        cfg: Any,
        width: int,
        vocab_size: int,
        tap: int,
        device: torch.device | str | None = None,
    ):
        super().__init__(cfg)
        self.taps = (tap,)
        self.width, self.vocab_size = width, vocab_size
        size = cfg.draft_vocab or vocab_size
        own = None
        if not cfg.share_lm_head:
            own = nn.Parameter(torch.zeros(cfg.heads, size, width, device=device))
        self.register_parameter("proj", own)
        if cfg.draft_vocab:
            self.d2t = torch.zeros(size, dtype=torch.int64, device=device)
        self._shared: Tensor | None = None
        self.make(device)

    def make(self, device: torch.device | str | None) -> None:
        """Add the weights between the feature and the projection, at their start. Default:
        none."""

    @classmethod
    def build(cls, target: Target, cfg: Any) -> Self:
        """The module for a target with every block at its start, the projection still
        empty."""
        return cls(cfg, target.hidden_size, target.vocab_size, target.num_layers, target.device)

    @classmethod
    def for_target(cls, target: Target, cfg: Any, counts: Tensor | None = None) -> Self:
        """Fresh heads, equal to the target's LM head. Raises UserError when the draft
        vocabulary is too large.
        """
        head = cls.build(target, cfg)
        if cfg.draft_vocab:
            ids = head.choose_vocabulary(counts, cfg.draft_vocab)
            head.d2t = vocab.to_d2t(ids.to(target.device))
        if head.proj is not None:
            head.proj.data.copy_(head._lm_rows(target).float())
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        """See Stored."""
        return cls(known.config, known.width, known.vocab_size, known.taps[0])

    def config_json(self) -> dict[str, Any]:
        """See Head; also the tap with its convention."""
        return {
            **super().config_json(),
            "width": self.width,
            "vocab_size": self.vocab_size,
            "taps": list(self.taps),
            "tap_convention": "hidden_states[k] of transformers; num_layers = output "
            "after the final norm",
        }

    def _lm_rows(self, target: Target) -> Tensor:
        """The LM head's rows of the draft vocabulary with the final scale inside; a softcap
        or a bias is left out (a softcap keeps the order of tokens, which is what a draft
        needs)."""
        ids = self.ids()
        rows = target.lm_head_weight if ids is None else target.lm_head_weight[ids]
        return rows.detach() if target.head.scale == 1 else rows.detach() * target.head.scale

    def projection(self, target: Target) -> Tensor:
        """[K, Vd, D], or the shared frozen [Vd, D] (gathered once)."""
        if self.proj is not None:
            return self.proj
        if self._shared is None:
            self._shared = self._lm_rows(target)
        return self._shared

    def states(self, batch: Batch, target: Target, feats: Tensor, reads: Tensor) -> Tensor:
        """Hidden state [K, n, D] of head k for supervised token j, read at flat position
        reads[k, j].

        feats: [B * T, D] features; a position of `reads` [K, n] that does not exist is clamped
            to a real one.
        """
        raise TypeError(f"{type(self).__name__} must define states")

    def low_rank(self, batch: Batch, flat: Tensor) -> tuple[Tensor, Tensor] | None:
        """A term m W^T that all heads add to their logits at the supervised tokens `flat` [n]:
        m [n, r] and W [Vd, r].
        Default: none."""
        return None

    def plan(self, batch: Batch, step: int) -> Tensor:
        """See Head: flat places [n] of the supervised tokens that have a past."""
        return batch.supervised(1)

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Loss over the supervised tokens alone: they are gathered before the first matmul.

        The count is the number of supervised tokens, so the loss is the sum over heads of
        decay^i times their mean.
        """
        feats, flat = self._features(batch, target)
        place, valid, reads = self._reads(batch, flat)
        x = self.states(batch, target, feats, reads)
        distribution, terms = None, self.cfg.loss
        if terms.needs_distribution:
            distribution = target_distribution(
                target, self.probs_rows(target), feats, flat - 1, self.ids(), place, terms.mask
            )
        scale = torch.tensor([self.cfg.decay**i for i in range(self.cfg.heads)], device=x.device)
        chunk = chunk_of(self.cfg.chunk, x.device)
        taught = Taught(place, valid, terms, scale, distribution, chunk)
        pair = self.low_rank(batch, flat)
        total, rows = chunked_loss(x, self.projection(target), taught, pair)
        count = torch.tensor(float(flat.numel()), dtype=torch.float64, device=x.device)
        return LossOut(total, count, rows.stats())

    def _features(self, batch: Batch, target: Target) -> tuple[Tensor, Tensor]:
        """Features [B * T, D] and flat places [n] of the supervised tokens; the first of a
        document has no past."""
        feats = target.features(batch.ids, batch.mask, self.taps, position=batch.position)[:, :, 0]
        return feats.reshape(-1, feats.shape[-1]), self.planned(batch)

    def _reads(self, batch: Batch, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each supervised token: its place in the draft vocabulary [n], which heads can
        see it [K, n], and the flat position that head i reads, i + 2 before the token: [K,
        n]."""
        place = vocab.places(self.ids(), batch.ids.reshape(-1)[flat])
        back = torch.arange(2, self.cfg.heads + 2, device=flat.device)[:, None]
        return place, batch.depth()[flat] >= back, (flat - back).clamp(min=0)

    @torch.no_grad()
    def forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """See Head; at most as many levels as there are heads."""
        feats, flat = self._features(batch, target)
        _, valid, reads = self._reads(batch, flat)
        hidden, extra = self.states(batch, target, feats, reads), self.low_rank(batch, flat)
        proj, size = self.projection(target), chunk_of(self.cfg.chunk, flat.device)
        for k in range(min(levels, self.cfg.heads)):
            w = (proj if proj.dim() == 2 else proj[k]).to(hidden.dtype)
            for part in losses.pieces(flat.numel(), size):
                ok = valid[k, part]
                z = hidden[k, part][ok] @ w.T
                if extra is not None:
                    z = z + extra[0][part][ok].to(z.dtype) @ extra[1].to(z.dtype).T
                yield flat[part][ok], k, z

    @property
    def levels(self) -> int:
        """See Head."""
        return int(self.cfg.heads)

    @property
    def deepest(self) -> int:
        """See Head."""
        return int(self.cfg.heads)
