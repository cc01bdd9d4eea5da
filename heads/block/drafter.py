"""Drafting with a block head (decode.grow draws the draft).

`observe` projects the features of newly committed tokens to keys and values and appends them;
the cache holds exactly the committed positions but the anchor's, whose feature does not exist
yet, and nothing is ever computed again. `open` runs one block at the anchor; its keys stand
behind the committed ones, where the next `observe` overwrites them. All levels are known then,
but for the Markov term: with one the children of a node come from its own token.

Shape letters: B live rows, D width, F taps, R rows of a block, P nodes of a level, Vd draft
vocabulary, S cache slots.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from decode import grow
from decode.attention import tree_attention
from decode.grow import Form, Nodes
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree
from heads.block.net import Keys
from heads.eagle.cache import DraftCache
from heads.eagle.layer import rope_table

if TYPE_CHECKING:
    from heads.block.head import BlockHead


class BlockDrafter:
    """A chain or tree drafter over a copy of the head's weights in the target's dtype. See
    decode.drafters.Drafter.
    """

    def __init__(self, head: BlockHead, target: Target, form: Form) -> None:
        self.name, self.form, self.shape = f"{head.kind}@{form.shape}", form, form.shape
        self.taps, self.max_depth, self.max_nodes = head.taps, form.depth, form.nodes
        self.cfg, self.device = head.cfg, target.device
        self.net = (
            copy.deepcopy(head.net)
            .to(device=target.device, dtype=target.dtype)
            .eval()
            .requires_grad_(False)
        )
        self.proj = head.projection(target).detach().to(target.dtype)
        self.ids, self.embed = head.ids(), target.embed
        self.least = head.cfg.least if form.shape == "chain" else 0.0
        self.temperatures: list[float] = head.calibration.get("confidence") or [1.0]
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything; room for `rows` rows of `max_len` committed tokens and a block
        behind them."""
        room = max(self.cfg.block, self.max_depth + 1)
        slots = max_len + room + self.max_depth + 2  # a padded observation may stick out
        dtype = self.proj.dtype
        self.cache = DraftCache(self.net, rows, slots, dtype, self.device)
        self.rope = rope_table(self.net.config, slots, dtype, self.device)
        self.last = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.lengths: list[int] = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append rows; what they hold comes with observe."""
        need = len(self.lengths) + len(prompts)
        if need > self.last.shape[0]:
            raise ValueError(f"begin: {need} rows, but reset made room for {self.last.shape[0]}")
        self.lengths += [0] * len(prompts)

    @torch.inference_mode()
    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens [b, n_max], feats [b, n_max, F, D], n [b]: feature i stands before token i."""
        if feats is None:
            raise ValueError("a block head drafts from the target's features; none were given")
        lengths, counts = self.lengths[rows], n.tolist()
        new = max(counts)
        places = self.cache.aim(rows, lengths, 0, new)
        c = self.net.fuse(feats[:, :new].to(self.proj.dtype))
        rope = (self.rope[0][places], self.rope[1][places])
        for layer, (key, value) in enumerate(self.net.context(c, rope)):
            self.cache.update(key, value, layer)
        newest = tokens.gather(1, (n[:, None] - 1).clamp(min=0))[:, 0]
        self.last[rows] = torch.where(n > 0, newest, self.last[rows])
        self.lengths[rows] = [a + b for a, b in zip(lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""
        if rows != list(range(len(rows))):
            self.cache.select(rows, max((self.lengths[r] for r in rows), default=0))
            self.last[: len(rows)] = self.last[rows]
        self.lengths = [self.lengths[r] for r in rows]

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]. A slot is left out by what was drawn before it:
        its own token is not known yet when its chance is taken."""
        tree = grow.draft(self, self.form, budget, sampling, rng)
        if not (self.least and tree.width):
            return tree
        likely = torch.stack(self.chances, 1).sigmoid().cumprod(1) >= self.least
        return replace(tree, size=tree.size.minimum(likely.cumprod(1).sum(1)))

    # -- growing (decode.grow.Source)

    def draft_ids(self) -> Tensor | None:
        """See decode.grow.Source."""
        return self.ids

    def open(self, levels: int) -> Tensor:
        """See decode.grow.Source: the block. A block whose rows see each other has all that it
        was trained with."""
        count, before = len(self.lengths), self.cfg.before
        rows = before + levels if self.cfg.causal else self.cfg.block
        places = self.cache.aim(slice(0, count), self.lengths, 0, rows)
        seen = places if self.cfg.causal else places[:, -1:].expand(-1, rows)
        mask = (torch.arange(self.cache.reach, device=self.device) <= seen[..., None])[:, None]

        def attend(layer: int, query: Tensor, own: Keys) -> Tensor:
            key, value = self.cache.update(*own, layer)
            return tree_attention(self.net, query, key, value, mask)[0].transpose(1, 2)

        x = self.net.rows(self.embed(self.last[:count]), rows)
        h = self.net.run(x, (self.rope[0][places], self.rope[1][places]), attend)
        self.state = h[:, before : before + levels]
        self.logits = F.linear(self.state, self.proj)
        self.chances: list[Tensor] = []
        return self._after(self.last[:count, None], 0)

    def level(self, nodes: Nodes) -> Tensor:
        """See decode.grow.Source."""
        return self._after(nodes.tokens, nodes.level)

    def _after(self, tokens: Tensor, level: int) -> Tensor:
        """Logits behind `tokens` [B, P] of one level: [B, P, Vd], [B, 1, Vd] without a Markov
        term."""
        near = self.net.before(tokens, self.logits.dtype)
        if self.least:
            side = None if near is None else near[:, 0]
            flat = self.temperatures[min(level, len(self.temperatures) - 1)]
            self.chances.append(self.net.chance(self.state[:, level], side) / flat)
        known = self.logits[:, level, None]
        if near is None or self.net.markov_out is None:
            return known
        return known + F.linear(near, self.net.markov_out)
