"""EAGLE-1, EAGLE-3 and HASS heads: one decoder layer that predicts the target's features or
tokens step by step.

Row t reads (f_t, e_{t+1}) and predicts x_{t+2} (heads/eagle/net.py). With `steps` > 1 the
training-time test of EAGLE-3 (for EAGLE-1: the harmonised context of HASS) runs the drafter on
its own outputs: at step s row t reads its previous output and e_{t+1+s}, attends to the rows
up to t of step 0 and to its own later keys, and predicts x_{t+2+s}; the loss of step s counts
step_decay ** s. With `parallel` a row reads a trained mask there in place of its output and
the token (P-EAGLE). A token is supervised by its own loss mask (the predicted token's, at t +
2 + s). Trained by train/eagle.py; conf/head/eagle1.yaml and eagle3.yaml hold the keys.

Shape letters: B rows, T positions, D width, S steps, Vd draft vocabulary, F taps, n supervised
tokens, R packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.target import Target
from outrider.heads import losses, vocab
from outrider.heads.batch import Batch, LossOut
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.drafter import EagleDrafter, ParallelEagleDrafter
from outrider.heads.eagle.net import Eagle3Net, EagleNet
from outrider.heads.eagle.noise import feature_noise
from outrider.heads.eagle.places import Places
from outrider.heads.eagle.saved import EagleSaved
from outrider.heads.layers.attention import Memory
from outrider.heads.layers.head import LayeredHead
from outrider.heads.layers.modules import cast_once, take
from outrider.heads.losses import Taught, chunk_of, chunked_loss
from outrider.heads.names import DraftSpec
from outrider.heads.recompute import plainly, recomputed


class EagleHead(LayeredHead):
    """What EAGLE-1 and EAGLE-3 share. net: the network."""

    Config = EagleConfig
    Saved: ClassVar[type[EagleSaved]] = EagleSaved
    cfg: EagleConfig
    net: EagleNet
    why: ClassVar[str] = " inside head.sliding_window"

    @classmethod
    def for_target(cls, target: Target, cfg: EagleConfig, counts: Tensor | None = None) -> Self:
        """See LayeredHead. Raises UserError also for a window that is longer than the target's
        context."""
        if (cfg.sliding_window or 0) > target.context_length:
            raise UserError(
                f"head.sliding_window: {cfg.sliding_window}, but the target's context ends at "
                f"{target.context_length}; give that or less, or null for all of it"
            )
        return super().for_target(target, cfg, counts)

    def start(self, target: Target, counts: Tensor | None) -> None:
        """See LayeredHead. Default: nothing."""

    # -- training

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """The loss summed over supervised tokens and steps. The vocabulary is met only where a
        token is supervised, and the target's distribution there is computed once for all steps."""
        places = self.places(batch)
        flat, valid = places.flat, places.valid
        feats, hidden = self._unroll(batch, target, places)
        place = vocab.places(self.ids(), batch.ids.reshape(-1)[flat])
        exponents = torch.arange(self.cfg.steps, dtype=torch.float64, device=flat.device)
        weights = (self.cfg.step_decay**exponents).float()
        terms = self.cfg.loss
        distribution = (
            self.distribution(target, feats, flat - 1, place) if terms.needs_distribution else None
        )
        read = self.net.read(torch.stack(hidden))
        chunk = chunk_of(self.cfg.chunk, flat.device)
        taught = Taught(place, valid, terms, weights, distribution, chunk)
        total, rows = chunked_loss(read, self.projection(target), taught)
        stats = rows.stats()
        if self.cfg.feature_loss:
            # Row t of step s guesses f_{t+1+s}, one before its token.
            wanted = feats[flat - 1].to(total.dtype)
            for s, h in enumerate(hidden):
                apart = F.smooth_l1_loss(h.to(total.dtype), wanted, reduction="none")
                error = apart.mean(-1) * valid[s]
                total = total + self.cfg.feature_loss * weights[s] * error.sum()
                both = error.detach().sum().double(), valid[s].sum().double()
                stats[f"feature_{s}"] = torch.stack(both)
        count = torch.full((), float(flat.numel()), dtype=torch.float64, device=flat.device)
        return LossOut(total, count, stats)

    def plan(self, batch: Batch, step: int) -> Places:
        """See Head."""
        return Places.of(batch, self.cfg.steps)

    def places(self, batch: Batch, levels: int = 0) -> Places:
        """Where the rows of a pass of `levels` steps stand (0: as many as training has)."""
        known, steps = batch.plan, levels or self.cfg.steps
        if isinstance(known, Places) and known.steps == steps:
            return known
        return Places.of(batch, steps)

    def _unroll(self, batch: Batch, target: Target, places: Places) -> tuple[Tensor, list[Tensor]]:
        """Features of the last tap [B * T, D]; per step h [n, D] of the row that predicts each
        supervised token."""
        (_, length), cfg = batch.ids.shape, self.cfg
        reads = self.taps if self.final in self.taps else (*self.taps, self.final)
        feats = target.features(batch.ids, batch.mask, reads, position=batch.position).detach()
        e = self.embed(target, batch.ids).detach()
        cos, sin = self.net.rope(length + places.steps, e.dtype, e.device)
        first = (
            (cos[None, :length], sin[None, :length])
            if batch.position is None
            else (cos[batch.position], sin[batch.position])
        )
        hidden, flat_e = [], e.flatten(0, 1)
        at, keep = places.at, places.layout.rows

        def start(memory: Memory) -> tuple[Tensor, Memory]:
            g, memory = self.net.start(feats[:, :, : len(self.taps)]), memory.at(0)
            if cfg.noise and self.training:
                g = g + feature_noise(batch, g, self.step, cfg.noise)
            e_next = torch.cat([e[:, 1:], e[:, -1:]], 1)
            return self.net.advance(e_next, g, first, keep, memory=memory), memory

        def go_on(h: Tensor, memory: Memory, step: int) -> tuple[Tensor, Memory]:
            memory, g = memory.at(step), self.net.feed(h)
            e_next = flat_e[(keep + 1 + step).clamp(max=flat_e.shape[0] - 1)]
            if cfg.parallel:
                e_next, g = cast(Eagle3Net, self.net).masked(h.shape[:1], h.dtype)
            rope = (cos[at + step][None], sin[at + step][None])
            return self.net.advance(e_next[None], g[None], rope, memory=memory)[0], memory

        again = recomputed if cfg.activation_checkpointing else plainly
        with cast_once(self.net, e.dtype):
            h, memory = again(start, Memory(places.layout, cfg.sliding_window or 0))
            for step in range(places.steps):
                if step:
                    h, memory = again(go_on, h, memory, step)
                spot = places.spot[step]  # without a row some spots coincide
                hidden.append(take(h, spot) if places.whole else h[spot])
        return feats[:, :, reads.index(self.final)].flatten(0, 1), hidden

    @property
    def levels(self) -> int:
        """See Head: every level that may be drafted. Beyond the steps of training the states
        are the head's own.
        """
        return max(self.cfg.steps, self.cfg.depth)

    @property
    def deepest(self) -> int | None:
        """See Head: the last drafted token still sees one of the text."""
        return None if self.cfg.sliding_window is None else self.cfg.sliding_window - 1

    @property
    def usual(self) -> int:
        """See Head."""
        return self.cfg.depth

    @torch.no_grad()
    def forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """See Head; also for more levels than training has steps."""
        places = self.places(batch, levels)
        flat, valid = places.flat, places.valid
        _, hidden = self._unroll(batch, target, places)
        proj = self.projection(target).to(target.dtype)
        size = chunk_of(self.cfg.chunk, flat.device)
        for step, h in enumerate(hidden):
            for part in losses.pieces(flat.numel(), size):
                ok = valid[step, part]
                yield flat[part][ok], step, self.net.read(h[part][ok]) @ proj.T

    def drafter(self, target: Target, draft: DraftSpec | None = None) -> Drafter:
        """See Head."""
        kind = ParallelEagleDrafter if self.cfg.parallel else EagleDrafter
        return kind(self, target, self.form(target, draft))


class Eagle3Head(EagleHead):
    """EAGLE-3: fused features of three layers, an LM head of its own over the draft
    vocabulary, tokens alone.
    """

    kind, Net = "eagle3", Eagle3Net
    net: Eagle3Net

    @classmethod
    def choose_taps(cls, target: Target, cfg: EagleConfig) -> tuple[int, ...]:
        """The configured ones, else hidden states 2, L // 2 and L - 3, as serving engines
        assume.
        """
        deep = target.num_layers
        for tap in cfg.taps:
            if not 0 <= tap <= deep:
                raise UserError(
                    f"head.taps: {tap} is not among the target's hidden states 0..{deep}; "
                    "0 = embeddings, the last = output after the final norm"
                )
        return tuple(cfg.taps) or tuple(
            min(max(1, tap), max(1, deep - 1)) for tap in (2, deep // 2, deep - 3)
        )

    def start(self, target: Target, counts: Tensor | None) -> None:
        """See LayeredHead: the output side is the target's."""
        self.start_output(target)
        if self.net.mask_embed is not None:
            self.start_mask(self.net.mask_embed, target)
