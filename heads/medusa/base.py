"""What Medusa and Hydra heads share: K heads on the target's last feature, one draft
vocabulary, one loss, one tree.

Head i (0-based) at position t predicts x_{t+i+2}; the target's own LM head predicts x_{t+1}
from the same feature f_t, taken after its final norm. A subclass says how head i comes from
f_t to its hidden state (`states`); from there on all is the same.

Shape letters: B rows, T positions, D width, K heads, Vd draft vocabulary, n supervised tokens,
r low rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.decode import devices
from outrider.decode.grow import Form, Nodes
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import losses, shapes, vocab
from outrider.heads.base import TAPS, Drafting, Head, HeadConfig
from outrider.heads.batch import Batch, LossOut
from outrider.heads.layers.plan import Plan
from outrider.heads.losses import Taught, chunk_of, chunked_loss
from outrider.heads.medusa.config import ParallelConfig as ParallelConfig
from outrider.heads.saved import Saved
from outrider.heads.teacher import target_distribution


@dataclass(kw_only=True)
class ParallelSaved(Saved):
    """What head.json says of Medusa and Hydra heads. width: of the target's features. taps:
    the hidden state that the heads read, one."""

    config: Any
    width: int
    vocab_size: int
    taps: list[int]
    tap_convention: str = ""

    def fits(self, target: Target) -> list[str]:
        size = self.config.draft_vocab or self.vocab_size
        found = vocab.problems(self.vocab_size, self.config.draft_vocab, target.vocab_size)
        found = found or shapes.problems(self.calibration, self.config.heads, size)
        if self.width != target.hidden_size:
            found.append(f"width: {self.width}, the target's is {target.hidden_size}")
        if len(self.taps) != 1 or not 0 <= self.taps[0] <= target.num_layers:
            found.append(
                f"taps: {self.taps[:9]}; one hidden state of 0..{target.num_layers} is read"
            )
        return found


class ParallelHead(Head):
    """Base of K heads. proj: [K, Vd, D] (absent with share_lm_head). d2t: [Vd] int64 offsets
    of the draft vocabulary (the identity map is not stored)."""

    Config: ClassVar[type[HeadConfig]] = ParallelConfig
    Saved: ClassVar[type[ParallelSaved]] = ParallelSaved
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
        size, own = cfg.draft_vocab or vocab_size, None
        if not cfg.share_lm_head:
            own = nn.Parameter(torch.zeros(cfg.heads, size, width, device=device))
        self.register_parameter("proj", own)
        if cfg.draft_vocab:
            self.d2t = torch.zeros(size, dtype=torch.int64, device=device)
        self.make(device)

    def make(self, device: torch.device | str | None) -> None:
        """Add the weights between the feature and the projection, at their start. Default:
        none."""

    @classmethod
    def build(cls, target: Target, cfg: Any) -> Self:
        """Make the module with every block at its start, the projection still empty."""
        return cls(cfg, target.hidden_size, target.vocab_size, target.num_layers, target.device)

    @classmethod
    def for_target(cls, target: Target, cfg: Any, counts: Tensor | None = None) -> Self:
        head = cls.build(target, cfg)
        if cfg.draft_vocab:
            ids = head.choose_vocabulary(counts, cfg.draft_vocab)
            head.d2t = vocab.to_d2t(ids.to(target.device))
        if head.proj is not None:
            head.proj.data.copy_(head.scaled_rows(target).float())
        return head

    @classmethod
    def restored(cls, known: Any, target: Target) -> Self:
        return cls(known.config, known.width, known.vocab_size, known.taps[0])

    def config_json(self) -> dict[str, Any]:
        return {
            **super().config_json(),
            "width": self.width,
            "vocab_size": self.vocab_size,
            "taps": list(self.taps),
            "tap_convention": TAPS,
        }

    def projection(self, target: Target) -> Tensor:
        """[K, Vd, D], or the shared frozen [Vd, D] of the target."""
        return self.scaled_rows(target) if self.proj is None else self.proj

    def states(self, batch: Batch, target: Target, feats: Tensor, reads: Tensor) -> Tensor:
        """Compute the hidden states [K, n, D] of head k for supervised token j, read from
        feats [B * T, D] at flat position reads[k, j]; one that does not exist means
        any."""
        raise TypeError(f"{type(self).__name__} must define states")

    def low_rank(self, batch: Batch, flat: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a term m W^T that all heads add to their logits at the supervised tokens
        `flat` [n]: m [n, r] and W [Vd, r]. Default: none."""
        return None

    def plan(self, batch: Batch, step: int) -> Plan:
        return Plan.of(batch, self.cfg.heads, past=1)

    def _unroll(self, batch: Batch, target: Target) -> tuple[Plan, Tensor, Tensor]:
        """Run the heads on the text: where rows stand, features [B * T, D], hidden [K, n,
        D]."""
        plan = self.planned(batch)
        feats = target.features(batch.ids, batch.mask, self.taps)[:, :, 0]
        feats = feats.flatten(0, 1)  # [B * T, D]
        return plan, feats, self.states(batch, target, feats, plan.rows[plan.spot])

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Compute the loss over the supervised tokens alone: they are gathered before the
        first matmul. Their number is the count, so the loss is the sum over heads of
        decay^i times their mean."""
        plan, feats, hidden = self._unroll(batch, target)
        index = vocab.places(self.ids(), batch.ids.reshape(-1)[plan.flat])  # [n]
        teacher, terms = None, self.cfg.loss
        if terms.needs_distribution:
            rows = self.probs_rows(target)
            teacher = target_distribution(
                target, rows, feats, plan.flat - 1, self.ids(), index, terms.mask
            )
        weights = torch.tensor([self.cfg.decay**i for i in range(self.cfg.heads)])  # [K]
        weights, chunk = weights.to(hidden.device), chunk_of(self.cfg.chunk, hidden.device)
        taught = Taught(index, plan.valid, terms, weights, teacher, chunk)
        pair = self.low_rank(batch, plan.flat)
        total, found = chunked_loss(hidden, self.projection(target), taught, pair)
        count = torch.full((), float(index.numel()), dtype=torch.float64, device=index.device)
        return LossOut(total, count, found.stats())

    @torch.no_grad()
    def teacher_forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Draft from the text's own tokens, at most as many levels as there are heads."""
        plan, _, hidden = self._unroll(batch, target)
        flat, extra = plan.flat, self.low_rank(batch, plan.flat)
        proj, size = self.projection(target), chunk_of(self.cfg.chunk, flat.device)
        for k in range(min(levels, self.cfg.heads)):
            w = (proj if proj.dim() == 2 else proj[k]).to(hidden.dtype)
            for part in losses.pieces(flat.numel(), size):
                ok = plan.valid[k, part]
                z = hidden[k, part][ok] @ w.T
                if extra is not None:
                    z = z + extra[0][part][ok].to(z.dtype) @ extra[1].to(z.dtype).T
                yield flat[part][ok], k, z

    @property
    def deepest(self) -> int:
        return int(self.cfg.heads)


def residual_blocks(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x + SiLU(W x + b), block after block, in x's dtype: x [K, n, D], weight [K, L, D, D],
    bias [K, L, D] (None: no blocks) -> [K, n, D]."""
    if weight is None or bias is None:
        return x
    for w, b in zip(weight.to(x.dtype).unbind(1), bias.to(x.dtype).unbind(1), strict=True):
        x = x + F.silu(torch.baddbmm(b[:, None], x, w.transpose(1, 2)))
    return x


# -- drafting


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
