"""EAGLE-1, EAGLE-3 and HASS heads: one decoder layer that predicts the target's features or
tokens step by step.

Row t reads (f_t, e_{t+1}) and predicts x_{t+2} (heads/eagle/net.py). With `steps` > 1 the
training-time test of EAGLE-3 (for EAGLE-1: the harmonised context of HASS) runs the drafter
on its own outputs: at step s row t reads its previous output and e_{t+1+s}, attends to the
rows up to t of step 0 and to its own later keys, and predicts x_{t+2+s}, supervised by that
token's own mask. With `parallel` a row reads a trained mask in place of its output and the
token (P-EAGLE).

Shape letters: B rows, T positions, D width, S steps, Vd draft vocabulary, F taps, n supervised
tokens, R packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.target import Target
from outrider.heads import losses, vocab
from outrider.heads.batch import Batch, LossOut, hash_u63
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.drafter import EagleDrafter, ParallelEagleDrafter
from outrider.heads.eagle.net import Eagle1Net, Eagle3Net, EagleNet
from outrider.heads.layers.attention import Memory
from outrider.heads.layers.head import LayeredHead, LayeredSaved
from outrider.heads.layers.plan import Plan
from outrider.heads.losses import Taught, chunk_of, chunked_loss
from outrider.heads.names import DraftSpec


@dataclass(kw_only=True)
class EagleSaved(LayeredSaved):
    """What head.json says of EAGLE heads."""

    config: EagleConfig

    def fits(self, target: Target) -> list[str]:
        found, deep = super().fits(target), target.num_layers
        # EAGLE-3 reads three by default; a shallow target's stand there more than once.
        most = 1 if self.config.kind == "eagle1" else max(3, deep + 1)
        if not 0 < len(self.taps) <= most or not all(0 <= tap <= deep for tap in self.taps):
            found.append(
                f"taps: {self.taps[:9]}; 1 to {most} of the hidden states 0..{deep} are read"
            )
        return found


class EagleHead(LayeredHead):
    """What EAGLE-1 and EAGLE-3 share. net: the network."""

    Config = EagleConfig
    Saved: ClassVar[type[EagleSaved]] = EagleSaved
    cfg: EagleConfig
    net: EagleNet

    # -- training

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Compute the loss, summed over supervised tokens and steps. The vocabulary is met
        only where a token is supervised, and the target's distribution there once for all
        steps."""
        cfg, plan = self.cfg, self.planned(batch)
        flat, valid = plan.flat, plan.valid  # [n], [S, n]
        feats, hidden = self._unroll(batch, target, plan)  # [B * T, D], [S, n, D]
        index = vocab.places(self.ids(), batch.ids.reshape(-1)[flat])  # [n]
        exponents = torch.arange(cfg.steps, dtype=torch.float64, device=flat.device)
        weights = (cfg.step_decay**exponents).float()  # [S]
        teacher = None
        if cfg.loss.needs_distribution:
            teacher = self.distribution(target, feats, flat - 1, index)
        chunk = chunk_of(cfg.chunk, flat.device)
        taught = Taught(index, valid, cfg.loss, weights, teacher, chunk)
        total, rows = chunked_loss(self.net.read(hidden), self.projection(target), taught)
        stats = rows.stats()
        if cfg.feature_loss:
            # Row t of step s guesses f_{t+1+s}, one before its token.
            wanted = feats[flat - 1].to(total.dtype)  # [n, D]
            for s, h in enumerate(hidden):
                apart = F.smooth_l1_loss(h.to(total.dtype), wanted, reduction="none")
                error = apart.mean(-1) * valid[s]  # [n]
                total = total + cfg.feature_loss * weights[s] * error.sum()
                both = error.detach().sum().double(), valid[s].sum().double()
                stats[f"feature_{s}"] = torch.stack(both)
        count = torch.full((), float(flat.numel()), dtype=torch.float64, device=flat.device)
        return LossOut(total, count, stats)

    def plan(self, batch: Batch, step: int) -> Plan:
        return Plan.of(batch, self.cfg.steps)

    def _unroll(self, batch: Batch, target: Target, plan: Plan) -> tuple[Tensor, Tensor]:
        """Run the drafter on the text: the features of the last tap [B * T, D], and of
        every step the output h of the row that predicts each supervised token [S, n, D]."""
        cfg, net, rows = self.cfg, self.net, plan.rows  # [R]
        reads = self.taps if self.final in self.taps else (*self.taps, self.final)
        feats = target.features(batch.ids, batch.mask, reads).detach()
        e = vocab.table(target, batch.ids).detach()  # [B, T, D]; feats: [B, T, F, D]
        flat_e = e.flatten(0, 1)  # [B * T, D]
        cos, sin = net.rope(batch.ids.shape[1] + plan.steps, e.dtype, e.device)  # [T + S, hd]

        def first(memory: Memory) -> tuple[Tensor, Memory]:
            g, memory = net.start(feats[:, :, : len(self.taps)]), memory.at(0)  # [B, T, D]
            if cfg.noise and self.training:
                g = g + feature_noise(batch, g, self.step, cfg.noise)
            e_next = torch.cat([e[:, 1:], e[:, -1:]], 1)  # [B, T, D]
            rope = cos[plan.depth], sin[plan.depth]  # [B, T, hd]
            return net.advance(e_next, g, rope, rows, memory=memory), memory

        def later(h: Tensor, memory: Memory, step: int) -> tuple[Tensor, Memory]:
            memory, g = memory.at(step), net.feed(h)  # [R, D]
            e_next = flat_e[(rows + 1 + step).clamp(max=len(flat_e) - 1)]  # [R, D]
            if cfg.parallel:
                e_next, g = cast(Eagle3Net, net).masked(h.shape[:1], h.dtype)
            rope = cos[plan.at + step][None], sin[plan.at + step][None]  # [1, R, hd]
            return net.advance(e_next[None], g[None], rope, memory=memory)[0], memory

        run: Any = lambda part, *args: part(*args)
        if cfg.activation_checkpointing:
            run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        hidden = []
        low = e.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(
            e.device.type, e.dtype, enabled=low
        ):  # casts weights once for all steps
            h, memory = run(first, Memory(plan.layout, cfg.sliding_window or 0))  # [R, D]
            for step in range(plan.steps):
                if step:
                    h, memory = run(later, h, memory, step)  # [R, D]
                hidden.append(h.index_select(0, plan.spot[step]))  # [n, D]
        return feats[:, :, reads.index(self.final)].flatten(0, 1), torch.stack(hidden)

    @property
    def levels(self) -> int:
        """Count every level that may be drafted: beyond the steps of training the states
        are the head's own."""
        return max(self.cfg.steps, self.cfg.depth)

    @property
    def deepest(self) -> int | None:
        """Limit a draft by the window: its last token still sees one of the text."""
        return None if self.cfg.sliding_window is None else self.cfg.sliding_window - 1

    @property
    def usual(self) -> int:
        return self.cfg.depth

    @torch.no_grad()
    def teacher_forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Draft from the text's own tokens, also for more levels than training has steps."""
        plan = self.planned(batch)
        if plan.steps != levels:
            plan = Plan.of(batch.to(torch.device("cpu")), levels).to(batch.ids.device)
        flat, valid = plan.flat, plan.valid
        _, hidden = self._unroll(batch, target, plan)
        proj = self.projection(target).to(target.dtype)
        size = chunk_of(self.cfg.chunk, flat.device)
        for step, h in enumerate(hidden):
            for part in losses.pieces(flat.numel(), size):
                ok = valid[step, part]
                yield flat[part][ok], step, self.net.read(h[part][ok]) @ proj.T

    def drafter(self, target: Target, draft: DraftSpec | None = None) -> Drafter:
        kind = ParallelEagleDrafter if self.cfg.parallel else EagleDrafter
        return kind(self, target, self.form(target, draft))


class Eagle1Head(EagleHead):
    """EAGLE-1 (Li et al. 2401.15077): embedding and LM head are the target's and frozen;
    learns features and tokens."""

    kind, Net = "eagle1", Eagle1Net
    net: Eagle1Net

    @classmethod
    def choose_taps(cls, target: Target, cfg: EagleConfig) -> tuple[int, ...]:
        return (target.num_layers,)


class Eagle3Head(EagleHead):
    """EAGLE-3 (Li et al. 2503.01840): fused features of three layers, an LM head of its own
    over the draft vocabulary; learns tokens alone."""

    kind, Net, mask_name = "eagle3", Eagle3Net, "mask_embed"
    net: Eagle3Net

    @classmethod
    def choose_taps(cls, target: Target, cfg: EagleConfig) -> tuple[int, ...]:
        """Choose the configured ones, else hidden states 2, L // 2 and L - 3, as serving
        engines assume."""
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
        self.start_output(target)


def feature_noise(batch: Batch, g: Tensor, step: int, spread: float) -> Tensor:
    """Draw uniform noise (u - 1/2) * spread * 512 / T for the features g [B, T, D] of each
    sample (EAGLE-1). Drawn from the step's and the sample's number: new at every update,
    the same on any number of ranks and after a resume. The device draws it: other devices,
    other numbers."""
    out = torch.zeros(g.shape, dtype=torch.float32, device=g.device)
    generator = torch.Generator(device=g.device)
    sizes = batch.sizes()
    for b, (sample, size) in enumerate(zip(batch.sample_ids.tolist(), sizes, strict=True)):
        generator.manual_seed(hash_u63(step, sample))
        drawn = torch.rand(size, g.shape[-1], generator=generator, device=g.device) - 0.5
        out[b, :size] = drawn * (spread * 512 / size)
    return out.to(g)
