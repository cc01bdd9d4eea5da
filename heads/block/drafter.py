"""Drafting with a block head (decode.grow draws the draft).

`observe` appends the keys and values of newly committed tokens; the cache holds exactly the
committed positions but the anchor's, whose feature does not exist yet. `open` runs one
block at the anchor, whose keys the next `observe` overwrites. All levels are known then,
but for the Markov term: with one the children of a node come from its own token.

Shape letters: B live rows, D width, F taps, R rows of a block, P nodes of a level, Vd draft
vocabulary, S cache slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import devices
from outrider.decode.attention import tree_attention
from outrider.decode.grow import Form, Nodes
from outrider.decode.target import Target
from outrider.heads.block.net import BlockNet, Keys
from outrider.heads.layers.drafter import LayeredDrafter
from outrider.heads.layers.head import LayeredHead


class BlockDrafter(LayeredDrafter):
    """h: [B] int64, the last committed tokens."""

    net: BlockNet

    def __init__(self, head: LayeredHead, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        self.cfg, self.most_rows = head.cfg, max(head.cfg.block, form.depth + 1)

    def blank(self, rows: int) -> Tensor:
        return torch.zeros(rows, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens [b, n_max], feats [b, n_max, F, D], n [b]: feature i is that before token
        i."""
        if feats is None:
            raise ValueError("a block head drafts from the target's features; none were given")
        counts = n.tolist()
        places = self.commit(rows, counts)
        c = self.net.fuse(feats[:, : places.shape[1]].to(self.dtype))
        for layer, (key, value) in enumerate(self.net.context(c, self.turned(places))):
            self.cache.update(key, value, layer)
        newest = tokens.gather(1, devices.send((n[:, None] - 1).clamp(min=0), self.device))[:, 0]
        if not min(counts):  # a row without news keeps its state
            newest = torch.where(devices.send(n, self.device) > 0, newest, self.h[rows])
        self.h[rows] = newest

    def open(self, levels: int) -> Tensor:
        """Run the block, all the rows that it was trained with."""
        count, before = len(self.lengths), self.cfg.before
        rows = self.cfg.block
        places = self.cache.aim(slice(0, count), self.lengths, 0, rows)
        seen = places[:, -1:].expand(-1, rows)
        mask = self.cache.back(seen)[:, None]

        def attend(layer: int, query: Tensor, own: Keys) -> Tensor:
            key, value = self.cache.update(*own, layer)
            return tree_attention(self.net, query, key, value, mask)[0].transpose(1, 2)

        x = self.net.rows(self.embed(self.h[:count]), rows)
        h = self.net.run(x, self.turned(places), attend)
        self.known = F.linear(h[:, before : before + levels], self.proj)
        return self._after(self.h[:count, None], 0)

    def level(self, nodes: Nodes) -> Tensor:
        return self._after(nodes.tokens, nodes.level)

    def _after(self, tokens: Tensor, level: int) -> Tensor:
        """Return logits behind `tokens` [B, P] of one level: [B, P, Vd], [B, 1, Vd] without
        a Markov term."""
        return self.net.after(self.known[:, level, None], self.net.before(tokens, self.dtype))
