"""Medusa heads (Cai et al. 2024): K small heads on the target's last feature, each guessing one token further ahead.

Head i (0-based) reads f_t, the target's output feature after its final norm at position t, and predicts x_{t+i+2};
the target's own LM head predicts x_{t+1} from the same feature. A head is L residual blocks x + SiLU(W x + b) and a
vocabulary projection. W = 0, b = 0 and a projection copied from the LM head make every fresh head equal the LM head.
Trained by train/medusa.py; conf/head/medusa.yaml holds the keys.

Shape letters: B rows, T positions, D width, K heads, L blocks, Vd draft vocabulary, n supervised tokens, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, Proposal, TreeShape
from heads import shapes, vocab
from heads.base import Batch, Head, HeadConfig, LossOut
from heads.losses import LossWeights, chunked_loss


@dataclass
class MedusaConfig(HeadConfig):
    """Medusa's keys."""

    kind: str = "medusa"
    # K: how many tokens ahead of the LM head to guess
    heads: int = 4
    # L: residual blocks of each head
    blocks: int = 1
    # number of frequent tokens the heads predict; 0 = the whole vocabulary
    draft_vocab: int = 8192
    # use the target's frozen LM head in place of a projection of each head's own
    share_lm_head: bool = False
    # head i's loss counts decay ** i
    decay: float = 0.8
    # what the heads learn from
    loss: LossWeights = field(default_factory=LossWeights)
    # supervised tokens whose logits exist at the same time
    chunk: int = 512
    # shape of the draft when the drafter is named without @chain or @tree
    shape: str = "tree"
    # nodes of the draft tree
    nodes: int = 16

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        found = [f"{key}: {getattr(self, key)} is below {low}; give {low} or more"
                 for key, low in (("heads", 1), ("blocks", 1), ("draft_vocab", 0), ("chunk", 1), ("nodes", 1))
                 if getattr(self, key) < low]
        if self.kind != "medusa":
            found.append(f"kind: {self.kind!r} is not medusa; use head=medusa")
        if not 0 < self.decay <= 1:
            found.append(f"decay: {self.decay} is outside (0, 1]; 0.8 is usual")
        if self.shape not in ("chain", "tree"):
            found.append(f"shape: {self.shape!r}; choose chain or tree")
        return found


class MedusaHead(Head):
    """K Medusa heads as stacked tensors: block_weight [K, L, D, D], block_bias [K, L, D], proj [K, Vd, D] (absent with
    share_lm_head), d2t [Vd] int64 offsets of the draft vocabulary (the identity map is not stored)."""

    kind = "medusa"
    Config = MedusaConfig
    proj: nn.Parameter | None
    d2t: Tensor | None

    def __init__(self, cfg: MedusaConfig, width: int, vocab_size: int, tap: int, device: torch.device | str = "cpu"):
        super().__init__(cfg)
        self.cfg: MedusaConfig = cfg
        self.taps = (tap,)
        self.width, self.vocab_size = width, vocab_size
        size = cfg.draft_vocab or vocab_size
        self.block_weight = nn.Parameter(torch.zeros(cfg.heads, cfg.blocks, width, width, device=device))
        self.block_bias = nn.Parameter(torch.zeros(cfg.heads, cfg.blocks, width, device=device))
        own = None if cfg.share_lm_head else nn.Parameter(torch.zeros(cfg.heads, size, width, device=device))
        self.register_parameter("proj", own)
        offsets = torch.zeros(size, dtype=torch.int64, device=device) if cfg.draft_vocab else None
        self.register_buffer("d2t", offsets)
        self.coverage = 1.0
        self.calibration: dict[str, Any] = {}
        self._shared: Tensor | None = None

    @classmethod
    def for_target(cls, target: Target, cfg: MedusaConfig, counts: Tensor | None = None) -> Self:
        """Fresh heads, equal to the target's LM head. Raises UserError when the draft vocabulary is too large."""
        head = cls(cfg, target.hidden_size, target.vocab_size, target.num_layers, target.device)
        if cfg.draft_vocab:
            if counts is None:
                raise UserError("head.draft_vocab: no token counts to choose from; set head.draft_vocab=0")
            chosen = vocab.choose(counts, cfg.draft_vocab).to(target.device)
            head.coverage = vocab.coverage(counts, chosen)
            head.d2t = vocab.to_d2t(chosen)
        if head.proj is not None:
            head.proj.data.copy_(head._lm_rows(target).float())
        return head

    @classmethod
    def from_json(cls, saved: dict[str, Any], target: Target) -> Self:
        """See Head. Raises KeyError or TypeError for a file this class did not write."""
        keys = dict(saved["config"])
        cfg = MedusaConfig(**{**keys, "loss": LossWeights(**keys["loss"])})
        head = cls(cfg, saved["width"], saved["vocab_size"], saved["taps"][0], target.device)
        head.coverage, head.calibration = saved["coverage"], saved["calibration"]
        return head

    def config_json(self) -> dict[str, Any]:
        """See Head; also the tap with its convention, the vocabulary's coverage and the measured acceptance."""
        return {**super().config_json(), "width": self.width, "vocab_size": self.vocab_size, "taps": list(self.taps),
                "tap_convention": "hidden_states[k] of transformers; num_layers = output after the final norm",
                "coverage": self.coverage, "calibration": self.calibration}

    def restore_json(self, saved: dict[str, Any]) -> None:
        """See Head: the measured acceptance."""
        self.calibration = saved["calibration"]

    def ids(self) -> Tensor | None:
        """[Vd] int64 ascending target ids of the draft vocabulary, None for the whole one."""
        return None if self.d2t is None else vocab.from_d2t(self.d2t)

    def _lm_rows(self, target: Target) -> Tensor:
        """The LM head's rows of the draft vocabulary with the final scale inside; a softcap or a bias is left out (a
        softcap keeps the order of tokens, which is what a draft needs)."""
        ids = self.ids()
        rows = target.lm_head_weight if ids is None else target.lm_head_weight[ids]
        return rows.detach() if target.head.scale == 1 else rows.detach() * target.head.scale

    def _projection(self, target: Target) -> Tensor:
        """[K, Vd, D], or the shared frozen [Vd, D] (gathered once)."""
        if self.proj is not None:
            return self.proj
        if self._shared is None:
            self._shared = self._lm_rows(target)
        return self._shared

    def hidden(self, x: Tensor) -> Tensor:
        """The residual blocks. x: [K, n, D] in any float dtype -> the same shape and dtype."""
        weight, bias = self.block_weight.to(x.dtype), self.block_bias.to(x.dtype)
        for layer in range(self.cfg.blocks):
            x = x + F.silu(torch.baddbmm(bias[:, layer, None], x, weight[:, layer].transpose(1, 2)))
        return x

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Loss over the supervised tokens alone: they are gathered before the first matmul.

        The count is the number of supervised tokens, so the loss is the sum over heads of decay^i times their mean.
        """
        feats, rows, steps = self._features(batch, target)
        place, valid, reads = self._reads(batch, rows, steps)
        x = feats[reads]  # [K, n, D]
        law = self._law(target, feats, rows * batch.ids.shape[1] + steps) if self.cfg.loss.needs_law else None
        weights = torch.tensor([self.cfg.decay**i for i in range(self.cfg.heads)], device=x.device)
        total, losses, hits = chunked_loss(self.hidden(x), self._projection(target), place, valid, law,
                                           self.cfg.loss, weights, self.cfg.chunk)
        stats = {f"loss_{i}": losses[i] for i in range(self.cfg.heads)}
        stats |= {f"top1_{i}": hits[i] for i in range(self.cfg.heads)}
        return LossOut(total, torch.tensor(float(rows.numel()), dtype=torch.float64, device=x.device), stats)

    def _features(self, batch: Batch, target: Target) -> tuple[Tensor, Tensor, Tensor]:
        """Flat features [B * T, D] and (row [n], position [n]) of the supervised tokens; position 0 has no past."""
        feats = target.features(batch.ids, batch.mask, self.taps)[:, :, 0]
        rows, steps = (batch.loss_mask & batch.mask).nonzero(as_tuple=True)
        later = steps > 0
        return feats.reshape(-1, feats.shape[-1]), rows[later], steps[later]

    def _reads(self, batch: Batch, rows: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each supervised token: its place in the draft vocabulary [n], which heads can see it [K, n], and the
        flat position that head i reads, i + 2 before the token: [K, n]."""
        flat = rows * batch.ids.shape[1] + steps
        tokens = batch.ids.reshape(-1)[flat]
        ids = self.ids()
        place = tokens if ids is None else vocab.places(ids, tokens)
        back = torch.arange(2, self.cfg.heads + 2, device=flat.device)[:, None]
        return place, steps >= back, (flat - back).clamp(min=0)

    def _law(self, target: Target, feats: Tensor, flat: Tensor) -> Any:
        """The target's law at the predicted token, p(x_s | x_<s) = softmax(unembed(f_{s-1})), restricted to the draft
        vocabulary and renormalised. Where its argmax lies outside there is none (EAGLE-3, Li et al. 2025)."""
        ids = self.ids()
        inside = None if ids is None else vocab.to_t2d(ids, self.vocab_size)

        def law(part: slice) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                logits = target.unembed(feats[flat[part] - 1])
                if ids is None or inside is None:
                    return torch.softmax(logits, -1), torch.ones_like(flat[part], dtype=torch.bool)
                return torch.softmax(logits.index_select(-1, ids), -1), inside[logits.max(-1).indices]

        return law

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch], target: Target) -> None:
        """Teacher-forced rank of every head's right token on held-out rows; keeps rank-wise acceptance a[k][rank] and
        the best tree of up to 64 nodes, grown from whole-path hits (heads are not independent)."""
        found = []
        proj = self._projection(target)
        for batch in batches:
            feats, rows, steps = self._features(batch, target)
            place, valid, reads = self._reads(batch, rows, steps)
            ranks = torch.full(place.shape, shapes.RANKS, dtype=torch.int64, device=place.device)[None]
            ranks = ranks.repeat(self.cfg.heads, 1)
            hidden = self.hidden(feats[reads])
            for start in range(0, place.numel(), self.cfg.chunk):
                part = slice(start, start + self.cfg.chunk)
                spot = place[part].clamp(min=0)[:, None]
                ok = place[part] >= 0
                for k in range(self.cfg.heads):
                    w = (proj if proj.dim() == 2 else proj[k]).to(hidden.dtype)
                    z = hidden[k, part] @ w.T
                    rank = (z > z.gather(1, spot)).sum(1).clamp_(max=shapes.RANKS)
                    ranks[k, part] = torch.where(ok & valid[k, part], rank, shapes.RANKS)
            found.append(_by_anchor(ranks, reads, valid, feats.shape[0]))
        if found and sum(f.shape[0] for f in found):
            self.calibration = shapes.measure(torch.cat(found))

    def tree(self, nodes: int | None = None) -> TreeShape:
        """The static tree of `nodes` nodes (default: the config's): measured if calibrated, else a generic one."""
        return shapes.tree(self.calibration, nodes or self.cfg.nodes, self.cfg.heads)

    def drafter(self, target: Target, shape: str | None = None) -> MedusaDrafter:
        """See Head."""
        kind = shape or (self.cfg.shape if target.support == "tree" else "chain")
        return MedusaDrafter(self, target, TreeShape.chain(self.cfg.heads) if kind == "chain" else self.tree(), kind)


def _by_anchor(ranks: Tensor, reads: Tensor, valid: Tensor, size: int) -> Tensor:
    """Ranks [K, n] by predicted token -> [A, K] by the position t they are read from; heads whose token is not
    supervised (the end of the answer) count as misses. Anchors without a supervised first token are left out."""
    table = torch.full((size, ranks.shape[0]), shapes.RANKS, dtype=torch.int64, device=ranks.device)
    first = torch.zeros(size, dtype=torch.bool, device=ranks.device)
    for k in range(ranks.shape[0]):
        table[reads[k][valid[k]], k] = ranks[k][valid[k]]
    first[reads[0][valid[0]]] = True
    return table[first]


class MedusaDrafter:
    """Drafts from the last feature of every row: a chain (sampled at T > 0) or a static tree of top ranks.

    Of a tree the candidates are deterministic at any temperature, so each is verified as a point mass.
    """

    def __init__(self, head: MedusaHead, target: Target, shape: TreeShape, kind: str) -> None:
        dtype = target.dtype
        self.name, self.kind, self.shape = f"medusa@{kind}", "medusa", kind
        self.taps, self.max_nodes, self.max_depth = head.taps, len(shape), shape.depth
        self.vocab = head.ids()
        self.cuts = {d: TreeShape(tuple(p for p in shape.paths if len(p) <= d)) for d in range(shape.depth + 1)}
        depth = shape.depth
        self.weight = head.block_weight.detach()[:depth].to(dtype, copy=True).transpose(2, 3)
        self.bias = head.block_bias.detach()[:depth, :, None].to(dtype, copy=True)
        proj = head._projection(target).detach().to(dtype, copy=head.proj is not None)
        self.proj = proj[:depth] if proj.dim() == 3 else proj
        rank = [[p[-1] for p in shape.paths], [len(p) - 1 for p in shape.paths]]
        self.rank, self.level = torch.tensor(rank, device=target.device)
        self.width = 1 + max((p[-1] for p in shape.paths), default=0)
        self.feats = torch.zeros(0, head.width, dtype=dtype, device=target.device)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget every row."""
        self.feats = self.feats[:0]

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append a row for each prompt; its feature comes with the first observe."""
        self.feats = torch.cat([self.feats, self.feats.new_zeros(len(prompts), self.feats.shape[1])])

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice = slice(None)) -> None:
        """Keep the feature that predicted the last committed token of each row; tokens [B, n_max],
        feats [B, n_max, 1, D], n [B] (a row with n = 0 keeps what it has)."""
        if feats is None:
            raise ValueError("Medusa drafts from the target's features; none were given")
        last = feats[torch.arange(n.shape[0], device=n.device), (n - 1).clamp(min=0), 0].to(self.feats.dtype)
        self.feats[rows] = torch.where(n[:, None] > 0, last, self.feats[rows])

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order."""
        self.feats = self.feats[rows]

    def logits(self, depth: int) -> Tensor:
        """[depth, B, Vd]: head i's guess at the token i + 1 after the last committed one."""
        x = self.feats.expand(depth, *self.feats.shape)
        for layer in range(self.weight.shape[1]):
            x = x + F.silu(torch.baddbmm(self.bias[:depth, layer], x, self.weight[:depth, layer]))
        return x @ self.proj.T if self.proj.dim() == 2 else torch.bmm(x, self.proj[:depth].transpose(1, 2))

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]."""
        rows, device = self.feats.shape[0], self.feats.device
        depth = min(self.max_depth, int(budget.max())) if rows else 0
        if depth <= 0:
            return DraftTree.empty(rows, device)
        shape = self.cuts[depth]
        logits = self.logits(depth)
        if self.shape == "chain" and not sampling.greedy:
            return self._sampled(logits, shape.size_at(budget), sampling, rng)
        top = logits.argmax(-1, keepdim=True) if self.width == 1 else logits.topk(self.width, -1).indices
        top = top if self.vocab is None else self.vocab[top]
        tokens = top[self.level[: len(shape)], :, self.rank[: len(shape)]].T
        return DraftTree.static(shape, tokens.contiguous(), shape.size_at(budget))

    def _sampled(self, logits: Tensor, size: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        depth, rows, width = logits.shape
        law = sampling.draft_law(logits.transpose(0, 1).reshape(rows * depth, width))
        node = torch.arange(depth, device=law.device)
        batch = torch.arange(rows, device=law.device)
        drawn = rng.draft(law, batch.repeat_interleave(depth), node.repeat(rows)).view(rows, depth)
        tokens = drawn if self.vocab is None else self.vocab[drawn]
        proposal = Proposal(law.view(rows, depth, width), node.expand(rows, depth), self.vocab)
        return DraftTree.chain(tokens, size, torch.ones_like(tokens, dtype=torch.bool), proposal)
