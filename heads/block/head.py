"""Block heads: DFlash (arXiv 2602.06036), its causal kind (JetSpec's mask, 2606.18394) and
DSpark (2607.05147). One pass drafts a whole block.

A block begins at an anchor x_t, the newest token, whose own feature does not exist yet; its
rows read the target's features of positions below t and each other (heads/block/net.py). Slot
k = 1 .. K predicts x_{t+k}: of DFlash row k, behind the anchor's own; of DSpark row k - 1.
With `causal` a row sees no later one, so a head drafts any number of slots. With a Markov term
the logits of slot k get W1[x_{t+k-1}] W2 added: the law of a token is then conditional on the
one before, the data's in training and the drafted one in drafting.

A slot is supervised by the loss mask of the token that it predicts, and so are all slots
before it in the block. Trained by train/block.py.

Shape letters: B rows, T positions, A blocks of a row, R rows of a block, K slots, D width, F
taps, Vd draft vocabulary, n supervised slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from decode.drafters import Drafter
from decode.grow import Form
from decode.target import Target
from heads import shapes, vocab
from heads.base import Batch, Head, LossOut, Saved
from heads.block import confidence
from heads.block.anchors import Anchors, draw, every
from heads.block.confidence import temperatures
from heads.block.config import BlockConfig
from heads.block.drafter import BlockDrafter
from heads.block.loss import Found, Task, block_loss, decaying
from heads.block.net import BlockNet, Keys, attend_blocks
from heads.eagle.init import start_norm
from heads.eagle.layer import LayerShape, layer_config, rope_table
from heads.limits import MOST_DEPTH
from heads.losses import LawFn, stored_law, target_law
from heads.names import Draft

MEASURED = 64  # tokens by which the size of the tapped features is measured
FORCED = 64  # blocks of a row that a forced pass runs at a time


@dataclass(kw_only=True)
class BlockSaved(Saved):
    """See Saved. layer: shape of the draft layers. final: number of the target's hidden state
    behind its final norm."""

    config: BlockConfig
    layer: LayerShape
    vocab_size: int
    taps: list[int]
    final: int
    tap_convention: str = ""

    def fits(self, target: Target) -> list[str]:
        """See Saved."""
        deep, size = target.num_layers, self.config.draft_vocab or self.vocab_size
        found = vocab.problems(self.vocab_size, self.config.draft_vocab, target.vocab_size)
        found = found or shapes.problems(self.calibration, MOST_DEPTH, size)
        found += confidence.problems(self.calibration)
        found += self.layer.fits(target, self.config.layers, "layer")
        if not self.taps or self.taps != sorted({t for t in self.taps if 0 <= t < deep}):
            found.append(f"taps: {self.taps[:9]} are not hidden states of 0..{deep - 1} in order")
        if self.final != deep:
            found.append(f"final: {self.final}, the target has {deep} layers")
        return found


class BlockHead(Head):
    """net: the network. drawn: what the draw of anchors starts from, the run's and the step."""

    Config = BlockConfig
    packs: ClassVar[bool] = True
    takes_stored_law: ClassVar[bool] = True

    def __init__(
        self,
        cfg: BlockConfig,
        shape: dict[str, Any],
        taps: tuple[int, ...],
        vocab_size: int,
        final: int,
    ) -> None:
        super().__init__(cfg)
        self.cfg: BlockConfig = cfg
        self.taps, self.vocab_size, self.final = taps, vocab_size, final
        self.net = BlockNet(cfg, shape, len(taps), vocab_size)
        self.drawn = (0, 0)
        if cfg.draft_vocab:
            self.d2t = torch.zeros(cfg.draft_vocab, dtype=torch.int64)

    # -- making one

    @classmethod
    def for_target(cls, target: Target, cfg: BlockConfig, counts: Tensor | None = None) -> Self:
        """See Head. Raises UserError for taps outside the target or on its last layer, a mask
        token that means something, or a draft vocabulary larger than the tokens seen."""
        seed = int(torch.randint(1 << 62, ()))
        taps = choose_taps(cfg.taps, target.num_layers)
        check_mask(cfg.mask_token, target, counts)
        shape = layer_config(target, cfg.layers)
        head = cls(cfg, shape, taps, target.vocab_size, target.num_layers)
        head.drawn = (seed, 0)
        if cfg.draft_vocab:
            head.d2t = vocab.to_d2t(head.choose_vocabulary(counts, cfg.draft_vocab))
        head.to(target.device)
        head._start(target, counts)
        return head

    @torch.no_grad()
    def _start(self, target: Target, counts: Tensor | None) -> None:
        """Random layers; the mask as large as an embedding; the output side the target's; each
        tap divided by its usual size, so that all are learned from alike."""
        net = self.net
        std = float(getattr(target.config, "initializer_range", 0.02) or 0.02)
        for weight in net.parameters():
            nn.init.normal_(weight, 0.0, std) if weight.dim() > 1 else nn.init.ones_(weight)
        table = target.model.get_input_embeddings().weight
        nn.init.normal_(net.mask, 0.0, float(table[:4096].float().square().mean().sqrt()))
        if self.cfg.mask_token >= 0:
            net.mask.copy_(
                target.embed(torch.tensor([self.cfg.mask_token], device=target.device))[0]
            )
            net.mask.requires_grad_(False)
        rows = self.target_rows(target)[0] * target.head.scale
        if net.lm_head is not None:
            net.lm_head.weight.copy_(rows)
        start_norm(net.norm, rows.float(), target)
        if net.markov_in is not None and net.markov_out is not None:
            # Unit rows on one side: what the zero side learns from is of one size for all.
            net.markov_in.copy_(F.normalize(net.markov_in, dim=-1))
            nn.init.zeros_(net.markov_out)
        if net.confidence is not None:
            nn.init.zeros_(net.confidence.bias)
        some = torch.arange(target.vocab_size) if counts is None else counts.argsort().flip(0)
        ids = some[None, :MEASURED].to(target.device)
        feats = target.features(ids, torch.ones_like(ids, dtype=torch.bool), self.taps)
        size = feats.float().square().mean(-1).sqrt()[0].median(0).values
        net.scale.copy_(size.clamp(min=1e-3))

    @classmethod
    def from_json(cls, saved: dict[str, Any], target: Target) -> Self:
        """See Head. Raises UserError for values that are no such head."""
        known = BlockSaved.read(saved, target, cls.kind)
        taps, layer = tuple(known.taps), asdict(known.layer)
        head = cls(known.config, layer, taps, known.vocab_size, known.final)
        head.coverage, head.calibration = known.coverage, known.calibration
        return head

    def config_json(self) -> dict[str, Any]:
        """See Head; also the draft layers' shape, the taps with their convention."""
        config = self.net.config
        return {
            **super().config_json(),
            "layer": {k: getattr(config, k) for k in LayerShape.__dataclass_fields__},
            "vocab_size": self.vocab_size,
            "taps": list(self.taps),
            "tap_convention": "hidden_states[k] of transformers; num_layers = output "
            "after the final norm",
            "final": self.final,
        }

    def projection(self, target: Target) -> Tensor:
        """The LM head over the draft vocabulary [Vd, D], trained or the target's."""
        if self.net.lm_head is not None:
            return self.net.lm_head.weight
        return self.target_rows(target)[0] * target.head.scale

    # -- training

    def begin_step(self, step: int, steps: int) -> None:
        """See Head: the anchors of this step."""
        self.drawn = (self.drawn[0], step)

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """The loss summed over the supervised slots of the drawn blocks, which are the count."""
        cfg = self.cfg
        on, chances, total, found = self._judged(batch, target)
        count = torch.tensor(float(found.loss.numel()), dtype=torch.float64, device=on.device)
        stats = _by_slot(on, found)
        if chances is not None:
            z = chances.to(total.dtype)
            wrong = F.binary_cross_entropy_with_logits(z, found.rate, reduction="none")
            weights = decaying(on, cfg.decay, wrong.dtype)
            total = total + cfg.confidence * (wrong * weights).sum()
            stats["confidence"] = torch.stack([wrong.detach().double().sum(), count])
        return LossOut(total, count, stats)

    def _judged(self, batch: Batch, target: Target) -> tuple[Tensor, Tensor | None, Tensor, Found]:
        """Of the drawn blocks: which slots are supervised [N, K], the confidence head's logits
        [n] there, None without such a head, the loss of the tokens and what was found."""
        cfg = self.cfg
        anchors = draw(batch, cfg.anchors, cfg.slots, self.drawn)
        feats, taught = self._features(batch, target)
        hidden = self._slots(batch, target, feats, anchors, cfg.slots)
        flat, there = anchors.labels(batch, cfg.slots)
        on = (there & batch.loss_mask.reshape(-1)[flat]).cumprod(2).bool().flatten(0, 1)
        flat, hidden = flat.flatten(0, 1)[on], hidden.flatten(0, 1)[on]
        tokens, ids = batch.ids.reshape(-1), self.ids()
        place = tokens[flat] if ids is None else vocab.places(ids, tokens[flat])
        decay = cfg.decay if cfg.weights == "decay" else None
        law = self._law(target, taught, flat, place)
        task = Task(on, place, law, cfg.loss, decay, bool(cfg.confidence), cfg.chunk)
        near = self.net.before(tokens[flat - 1], hidden.dtype)
        pair = None if near is None else (near, self.net.markov_out)
        total, found = block_loss(hidden, self.projection(target), pair, task)  # type: ignore[arg-type]
        chances = self.net.chance(hidden, near) if cfg.confidence else None
        return on, chances, total, found

    def _features(self, batch: Batch, target: Target) -> tuple[Tensor, Tensor | None]:
        """Tapped features [B, T, F, D], and the last ones [B * T, D] where the target's law
        follows from them."""
        law = self.cfg.loss.needs_law or bool(self.cfg.confidence)
        last = law and not getattr(target, "stored_law", None)
        reads = (*self.taps, self.final) if last else self.taps
        feats = target.features(batch.ids, batch.mask, reads, position=batch.position).detach()
        taught = feats[:, :, -1].flatten(0, 1) if last else None
        return feats[:, :, : len(self.taps)], taught

    def _law(
        self, target: Target, taught: Tensor | None, flat: Tensor, place: Tensor
    ) -> LawFn | None:
        """The target's law where tokens `flat` [n] stand; None where it is not needed."""
        terms = self.cfg.loss
        if not (terms.needs_law or self.cfg.confidence):
            return None
        if taught is None:
            stored = target.stored_law()  # type: ignore[attr-defined]
            return stored_law(stored, flat - 1, self.ids(), self.vocab_size, place, terms.mask)
        rows = self.law_rows(target)
        return target_law(target, rows, taught, flat - 1, self.ids(), place, terms.mask)

    def _slots(
        self, batch: Batch, target: Target, feats: Tensor, anchors: Anchors, slots: int
    ) -> Tensor:
        """What the LM head reads at every slot of the blocks, [B, A, K, D]."""
        return next(self._unroll(batch, target, feats, [anchors], slots))

    def _unroll(
        self, batch: Batch, target: Target, feats: Tensor, parts: list[Anchors], slots: int
    ) -> Iterator[Tensor]:
        """The same for one part of the anchors after the other; a block whose rows see each
        other has all that it was trained with."""
        net, (count, length) = self.net, batch.ids.shape
        rows = slots + self.cfg.before if self.cfg.causal else self.cfg.block
        cos, sin = rope_table(net.config, length + rows, feats.dtype, feats.device)
        position = batch.depth().view(count, length)
        c = net.fuse(feats)
        context = net.context(c, (cos[position], sin[position]))
        embedded = target.embed(batch.ids).detach()
        for anchors in parts:
            first = embedded.gather(1, anchors.place[..., None].expand(-1, -1, c.shape[-1]))
            at = position.gather(1, anchors.place)[..., None] + torch.arange(
                rows, device=position.device
            )
            seen = anchors.context(batch)

            def attend(layer: int, query: Tensor, own: Keys, seen: Tensor = seen) -> Tensor:
                return attend_blocks(query, context[layer], own, seen, self.cfg.causal)

            h = net.run(
                net.rows(first, rows).flatten(1, 2),
                (cos[at].flatten(1, 2), sin[at].flatten(1, 2)),
                attend,
            )
            h = h.unflatten(1, (-1, rows))
            yield h[:, :, self.cfg.before : self.cfg.before + slots]

    @property
    def levels(self) -> int:
        """See Head."""
        return self.cfg.slots

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch], target: Target) -> None:
        """See Head; also the temperatures of the confidence head."""
        kept = list(batches)
        super().calibrate(kept, target)
        if not (self.cfg.confidence and self.calibration):
            return
        parts = []
        for batch in kept:
            on, chances, _, found = self._judged(batch, target)
            assert chances is not None
            part = torch.zeros(2, *on.shape, dtype=torch.float64, device=on.device)
            part[0, on], part[1, on] = chances.double(), found.rate.double()
            parts.append((part, on))
        logits, rate = torch.cat([part for part, _ in parts], 1)
        fitted = temperatures(logits, rate, torch.cat([on for _, on in parts]))
        self.calibration["confidence"] = fitted

    @torch.no_grad()
    def forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """See Head; of blocks whose rows see each other at most as many levels as slots."""
        net, slots = self.net, levels if self.cfg.causal else min(levels, self.cfg.slots)
        proj = self.projection(target).to(target.dtype)
        tokens, supervised = batch.ids.reshape(-1), (batch.loss_mask & batch.mask).reshape(-1)
        feats = self._features(batch, target)[0]
        parts = every(batch, slots).split(FORCED)
        hidden = self._unroll(batch, target, feats, parts, slots)
        for anchors, h in zip(parts, hidden, strict=True):
            flat, there = anchors.labels(batch, slots)
            on = there & supervised[flat]
            for level in range(slots):
                some = flat[:, :, level][on[:, :, level]]
                z = h[:, :, level][on[:, :, level]] @ proj.T
                near = net.before(tokens[some - 1], z.dtype)
                if near is not None and net.markov_out is not None:
                    z = z + near @ net.markov_out.to(z.dtype).T
                yield some, level, z

    # -- drafting

    @property
    def deepest(self) -> int | None:
        """See Head: with rows that see each other, as many as a block was trained with."""
        return None if self.cfg.causal else self.cfg.slots

    def form(self, target: Target, draft: Draft | None = None) -> Form:
        """See Head."""
        asked = draft or Draft()
        longest = max(map(len, asked.paths)) if asked.paths else asked.depth or 0
        if self.deepest is not None and longest > self.deepest:
            raise UserError(
                f"decode settings: {longest} levels, but the rows of this head's blocks see each "
                f"other and were trained {self.deepest} slots long; give {self.deepest} or "
                "fewer, or train with head.causal=true"
            )
        if asked.depth is None and not asked.paths:
            asked = replace(asked, depth=self.cfg.depth or self.cfg.slots)
        return super().form(target, asked)

    def drafter(self, target: Target, draft: Draft | None = None) -> Drafter:
        """See Head."""
        return BlockDrafter(self, target, self.form(target, draft))


class DFlashHead(BlockHead):
    """Slots behind the anchor's row."""

    kind = "dflash"


class DSparkHead(BlockHead):
    """Slots from the anchor's row on."""

    kind = "dspark"


def choose_taps(given: list[int], deep: int) -> tuple[int, ...]:
    """The configured taps, else three that are evenly spread over the outputs of layers 1 to
    deep - 3 (of shallow targets those that there are). Raises UserError for others than the
    states 0 .. deep - 1."""
    for tap in given:
        if tap == deep:
            raise UserError(
                f"head.taps: {tap} is the target's last layer, read behind its final norm; "
                f"taps lie below it, give numbers of 0..{deep - 1}"
            )
        if not 0 <= tap < deep:
            raise UserError(f"head.taps: {tap} is not among the hidden states 0..{deep - 1}")
    usual = [round(2 + i * (deep - 4) / 2) for i in range(3)]
    return tuple(sorted(given and set(given) or {min(max(1, t), deep - 1) for t in usual}))


def check_mask(token: int, target: Target, counts: Tensor | None) -> None:
    """Raises UserError where the mask would be a token of texts. -1: none is asked for."""
    if token < 0:
        return
    fix = "give a reserved token that no text has, or -1"
    if token >= target.vocab_size:
        raise UserError(
            f"head.mask_token: {token} is not in the target's vocabulary of "
            f"{target.vocab_size}; {fix}"
        )
    if means(token, target) or (counts is not None and int(counts[token])):
        raise UserError(f"head.mask_token: the tokenizer uses {token}; {fix}")


def means(token: int, target: Target) -> bool:
    """Whether texts may hold a token: an ordinary one, or a special one with a role."""
    tokenizer: Any = target.tokenizer
    named = {getattr(tokenizer, f"{n}_token_id", None) for n in ("bos", "eos", "unk", "pad")}
    if token in named or token in target.eos_ids:
        return True
    if tokenizer is None or token >= len(tokenizer):
        return False
    return token not in tokenizer.all_special_ids


def _by_slot(on: Tensor, found: Found) -> dict[str, Tensor]:
    """Loss and hits of every slot as sums and counts."""
    slots = on.shape[1]
    number = torch.arange(slots, device=on.device).expand(on.shape)[on]
    count = torch.bincount(number, minlength=slots).double()

    def summed(values: Tensor) -> Tensor:
        return torch.bincount(number, values.double(), minlength=slots)

    loss, hits = summed(found.loss), summed(found.hit)
    return {f"loss_{k}": torch.stack([loss[k], count[k]]) for k in range(slots)} | {
        f"top1_{k}": torch.stack([hits[k], count[k]]) for k in range(slots)
    }
