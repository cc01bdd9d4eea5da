"""Block heads: DFlash (arXiv 2602.06036) and DSpark (2607.05147). One pass drafts a whole
block.

A block begins at an anchor x_t, the newest token, whose own feature does not exist yet; its
rows read the target's features of positions below t and each other (heads/block/net.py). Slot
k = 1 .. K predicts x_{t+k}: of DFlash row k, behind the anchor's own; of DSpark row k - 1.
With a Markov term the logits of slot k get W1[x_{t+k-1}] W2 added. A slot is supervised by the
loss mask of the token that it predicts, and so are all slots before it in the block.

Shape letters: B rows, T positions, A blocks of a row, R rows of a block, K slots, D width, F
taps, Vd draft vocabulary, n supervised slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.batch import Batch, LossOut
from outrider.heads.block.anchors import Anchors, Blocks, every
from outrider.heads.block.attention import BlockAttention
from outrider.heads.block.config import BlockConfig
from outrider.heads.block.drafter import BlockDrafter
from outrider.heads.block.net import BlockNet, look_back
from outrider.heads.layers.head import LayeredHead, LayeredSaved
from outrider.heads.losses import Taught, by_level, chunk_of, chunked_loss

MEASURED = 64  # tokens by which the size of the tapped features is measured
AT_A_TIME = 64  # blocks of a row in the teacher-forced pass


@dataclass(kw_only=True)
class BlockSaved(LayeredSaved):
    config: BlockConfig

    def fits(self, target: Target) -> list[str]:
        found, deep = super().fits(target), target.num_layers
        if not self.taps or self.taps != sorted({t for t in self.taps if 0 <= t < deep}):
            found.append(f"taps: {self.taps[:9]} are not hidden states of 0..{deep - 1} in order")
        return found


class BlockHead(LayeredHead):
    """net: the network. seed: of the run, from which anchors are drawn."""

    Config, Net, Drafts = BlockConfig, BlockNet, BlockDrafter
    Saved: ClassVar[type[BlockSaved]] = BlockSaved
    cfg: BlockConfig
    net: BlockNet
    seed = 0

    # -- making one

    @classmethod
    def for_target(cls, target: Target, cfg: BlockConfig, counts: Tensor | None = None) -> Self:
        seed = int(torch.randint(1 << 62, ()))
        head = super().for_target(target, cfg, counts)
        head.seed = seed
        return head

    @classmethod
    def choose_taps(cls, target: Target, cfg: BlockConfig) -> tuple[int, ...]:
        """Return the configured taps, else three that are evenly spread over the outputs of
        layers 1 to deep - 3 (of shallow targets those that there are)."""
        deep = target.num_layers
        for tap in cfg.taps:
            if not 0 <= tap < deep:
                raise UserError(
                    f"head.taps: {tap} is not among the hidden states 0..{deep - 1} below the "
                    "target's last layer, which is read behind its final norm; give some of them"
                )
        usual = {min(max(1, round(2 + i * (deep - 4) / 2)), deep - 1) for i in range(3)}
        return tuple(sorted(set(cfg.taps) or usual))

    @torch.no_grad()
    def start(self, target: Target, counts: Tensor | None) -> None:
        """A trained mask as large as an embedding; the output side the target's; every feature
        divided by its usual size: a few are hundreds of times larger than the others and the
        same everywhere, and would be all that is left behind a norm."""
        net = self.net
        table = target.embedding_weight
        if self.cfg.mask_token == -1:
            nn.init.normal_(net.mask, 0.0, float(table[:4096].float().square().mean().sqrt()))
        self.start_output(target)
        if net.markov_in is not None and net.markov_out is not None:
            # Unit rows on one side: what the zero side learns from is of one size for all.
            net.markov_in.copy_(F.normalize(net.markov_in, dim=-1))
            nn.init.zeros_(net.markov_out)
        some = torch.arange(target.vocab_size) if counts is None else counts.argsort().flip(0)
        ids = some[None, :MEASURED].to(target.device)
        feats = target.features(ids, torch.ones_like(ids, dtype=torch.bool), self.taps)
        net.scale.copy_(feats[0].float().abs().median(0).values.clamp(min=1e-3))
        if self.cfg.look_back:
            look_back(net, feats[0].float(), vocab.table(target, ids[0]).float())

    # -- training

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Return the loss summed over the supervised slots of the drawn blocks, which are
        the count."""
        cfg, blocks = self.cfg, self.planned(batch)
        slots, flat = blocks.slots, blocks.flat
        wanted = cfg.loss.needs_distribution or bool(cfg.confidence)
        reads = (*self.taps, self.final) if wanted else self.taps
        feats = target.features(batch.ids, batch.mask, reads).detach()
        hidden = next(self._unroll(batch, target, feats, [blocks.anchors], cfg.slots))
        hidden = hidden.flatten(0, 2).index_select(0, slots.at)  # [n, D]
        tokens = batch.ids.reshape(-1)
        place = vocab.places(self.ids(), tokens[flat])
        teacher = None
        if wanted:
            teacher = self.distribution(target, feats[:, :, -1].flatten(0, 1), flat - 1, place)
        near = self.net.before(tokens[flat - 1], hidden.dtype)
        pair = None if near is None else (near, cast(Tensor, self.net.markov_out))
        valid, one = torch.ones_like(place, dtype=torch.bool), torch.ones(1, device=place.device)
        weights, chunk = slots.decaying(cfg.decay), chunk_of(cfg.chunk, place.device)
        rated = bool(cfg.confidence)
        taught = Taught(place, valid[None], cfg.loss, one, teacher, chunk, weights, rated)
        total, rows = chunked_loss(hidden[None], self.projection(target), taught, pair)
        count = slots.sums(torch.ones_like(rows.loss[0]))
        found = (torch.stack([slots.sums(t[0]), count], 1) for t in (rows.loss, rows.hit))
        stats = by_level(*found)
        if cfg.confidence:
            z, rate = self.net.chance(hidden, near).to(total.dtype), rows.rate[0]
            wrong = F.binary_cross_entropy_with_logits(z, rate, reduction="none")
            total = total + cfg.confidence * (wrong * weights.to(wrong.dtype)).sum()
            stats["confidence"] = torch.stack([wrong.detach().double().sum(), count.sum()])
        return LossOut(total, count.sum(), stats)

    def plan(self, batch: Batch, step: int) -> Blocks:
        return Blocks.draw(batch, self.cfg.anchors, self.cfg.slots, (self.seed, step))

    def _unroll(
        self, batch: Batch, target: Target, feats: Tensor, parts: list[Anchors], slots: int
    ) -> Iterator[Tensor]:
        """Yield what the LM head reads at every slot of the blocks, [B, A, K, D], for one
        part of the anchors after the other. feats: [B, T, F or more, D]. A block has all
        the rows that it was trained with: they see each other."""
        net, rows, length = self.net, self.cfg.block, batch.ids.shape[1]
        cos, sin = net.rope(length + rows, feats.dtype, feats.device)
        c = net.fuse(feats[:, :, : len(self.taps)])
        context = net.context(c, (cos[None, :length], sin[None, :length]))
        embedded = vocab.table(target, batch.ids).detach()
        behind = torch.arange(rows, device=c.device)
        for anchors in parts:
            first = embedded.gather(1, anchors.place[..., None].expand(-1, -1, c.shape[-1]))
            at = anchors.place[..., None] + behind
            rope = (cos[at].flatten(1, 2), sin[at].flatten(1, 2))
            attend = BlockAttention(anchors, rows, context)
            again = self.cfg.activation_checkpointing and torch.is_grad_enabled()
            h = net.run(net.rows(first, rows).flatten(1, 2), rope, attend, again)
            h = h.unflatten(1, (-1, rows))
            yield h[:, :, self.cfg.before : self.cfg.before + slots]

    @torch.no_grad()
    def teacher_forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Draft from the text's own tokens, at most as many levels as slots."""
        net, slots = self.net, min(levels, self.cfg.slots)
        proj = self.projection(target).to(target.dtype)
        tokens, supervised = batch.ids.reshape(-1), (batch.loss_mask & batch.mask).reshape(-1)
        feats = target.features(batch.ids, batch.mask, self.taps)
        parts = every(batch, AT_A_TIME)
        hidden = self._unroll(batch, target, feats, parts, slots)
        for anchors, h in zip(parts, hidden, strict=True):
            flat, there = anchors.labels(batch, slots)
            on = there & supervised[flat]
            for level in range(slots):
                some = flat[:, :, level][on[:, :, level]]
                z = h[:, :, level][on[:, :, level]] @ proj.T
                yield some, level, net.after(z, net.before(tokens[some - 1], z.dtype))

    # -- drafting

    @property
    def deepest(self) -> int:
        return self.cfg.slots

    @property
    def usual(self) -> int:
        return self.cfg.depth or self.cfg.slots


class DFlashHead(BlockHead):
    """Slots behind the anchor's row."""

    kind = "dflash"


class DSparkHead(BlockHead):
    """Slots from the anchor's row on."""

    kind = "dspark"
