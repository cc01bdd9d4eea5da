"""Drafting with an EAGLE head: a chain, a dynamic tree (EAGLE-2), or a static tree sampled
without replacement.

`observe` runs the newly committed rows, with the target's true features, through the layer and
extends its cache; `propose` goes on from the last row with the drafter's own outputs, in slots
that the next `observe` overwrites. So nothing is rolled back.

Shape letters: B live rows, D width, Vd draft vocabulary, W tokens read together, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import attention
from outrider.decode.graphs import SHORTEST, fixed_size
from outrider.decode.grow import Form, Nodes
from outrider.decode.target import Target
from outrider.heads.eagle.net import Eagle3Net, EagleNet
from outrider.heads.layers.drafter import LayeredDrafter
from outrider.heads.layers.head import LayeredHead

Pair = tuple[Tensor, Tensor]
PIECE = 512  # tokens of a prompt that are read at once where a window is narrower


class EagleDrafter(LayeredDrafter):
    """h: [B, D], what the layers gave at the last committed token."""

    net: EagleNet

    def __init__(self, head: LayeredHead, target: Target, form: Form) -> None:
        self.window = int(head.cfg.sliding_window or 0)
        super().__init__(head, target, form)
        self.net.config._attn_implementation = attention.NAME
        self.drafted = 0  # tokens read behind the committed ones in this cycle

    def reset(self, rows: int, max_len: int) -> None:
        super().reset(rows, max_len)
        self.cache.window = self.window

    def blank(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.proj.shape[1], dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens [b, n_max], feats [b, n_max, F, D], n [b]: row i is (feature before token i,
        token i)."""
        if feats is None:
            raise ValueError("EAGLE drafts from the target's features; none were given")
        # With a window a long prompt is read in pieces: its mask would be [T, T].
        size = max(PIECE, self.window) if self.window else max(1, tokens.shape[1])
        for start in range(0, max(1, int(n.max())), size):
            part, some = slice(start, start + size), (n - start).clamp(0, size)
            self._read(tokens[:, part], feats[:, part], some, rows)

    def _read(self, tokens: Tensor, feats: Tensor, n: Tensor, rows: slice) -> None:
        counts = n.tolist()
        places = self.commit(rows, counts)  # [b or 1, new]
        new = places.shape[1]
        mask = self.cache.back(places)[:, None] if self.cache.masked(places) else None
        g = self.net.start(feats[:, :new].to(self.dtype))
        h = self._pass(self.embed(tokens[:, :new]), g, places, mask, self.last(counts))
        if min(counts) == 0:  # a row without news keeps its state
            h = torch.where(n.to(self.device)[:, None] > 0, h, self.h[rows])
        self.h[rows] = h

    def _pass(
        self, e: Tensor, g: Tensor, at: Tensor, mask: Tensor | None, keep: Tensor | None = None
    ) -> Tensor:
        """Run the layers once at the positions `at`, writing where the cache aims."""
        seen = {"attention_mask": mask, "past_key_values": self.cache}
        return self.net.advance(e, g, self.turned(at), keep, **seen)

    # -- growing (decode.grow.LevelSource)

    def open(self, levels: int) -> Tensor:
        self.state, self.drafted = self.h[: len(self.lengths), None], 0
        return self.logits(self.state)

    def level(self, nodes: Nodes) -> Tensor:
        """Read every token beside the state that it follows."""
        above = nodes.of_parents(self.state)
        self.state, logits = self._extend(nodes.tokens, above, nodes.seen, nodes.level)
        return logits

    def logits(self, state: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        return F.linear(self.net.read(state), self.proj)

    def _extend(self, tokens: Tensor, above: Tensor, seen: Tensor | None, level: int) -> Pair:
        """Read drafted tokens [B, W] of one level that follow the states `above` [B, W, D]:
        their states [B, W, D], and logits."""
        start, new, cache, graphs = self.drafted, tokens.shape[1], self.cache, self.graphs
        self.drafted += new
        aimed = slice(0, len(self.lengths)), list(self.lengths), start, new, graphs is None
        places = at = cache.aim(*aimed)
        mask = None
        if seen is not None:
            at = (cache.ends + (level - 1)).expand(-1, new)
            mask = self._tree_mask(seen, cache.ends, level)
        elif graphs is not None or cache.masked(at):
            mask = cache.back(at)[:, None]
        if graphs is None or mask is None:
            return self._level(tokens, above, at, mask)

        def way(tokens: Tensor, above: Tensor, at: Tensor, places: Tensor, mask: Tensor) -> Pair:
            cache.hold(places, mask.shape[2])
            return self._level(tokens, above, at, mask[:, None])

        def plain() -> Pair:
            cache.aim(*aimed)
            return self._level(tokens, above, at, mask)

        given = [
            t.expand(len(tokens), *t.shape[1:]) for t in (tokens, above, at, places, mask[:, 0])
        ]
        most, slots = cache.keys.shape[1], cache.keys.shape[3]
        rows, size = fixed_size(len(tokens), 1, most), fixed_size(cache.reach, SHORTEST, slots)
        sizes = [(rows, *t.shape[1:]) for t in given[:-1]] + [(rows, new, size)]
        found: Any = graphs.run(cache, given, sizes, way, plain)
        return found

    def _level(self, tokens: Tensor, above: Tensor, at: Tensor, mask: Tensor | None) -> Pair:
        """Return states [B, W, D] and logits of one pass at the positions `at` [B or 1, W]."""
        state = self._pass(self.embed(tokens), self.net.feed(above), at, mask)
        return state, self.logits(state)

    def _tree_mask(self, ancestors: Tensor, ends: Tensor, level: int) -> Tensor:
        """[B or 1, 1, W, S] bool: committed slots and the ancestors' (the node's own
        included). ends: [B or 1, 1]."""
        slot = self.cache.line[self.cache.low : self.cache.reach]
        near = slot < ends
        if self.window:
            near &= slot > ends + level - 1 - self.window
        mask = near[:, None].expand(ancestors.shape[0], ancestors.shape[1], len(slot)).clone()
        if ends.shape[0] == 1:
            mask[:, :, len(slot) - ancestors.shape[2] :] = ancestors
        else:
            spot = ends + self.cache.line[: ancestors.shape[2]]
            spot = spot - self.cache.low if self.cache.low else spot
            mask.scatter_(2, spot[:, None].expand_as(ancestors), ancestors)
        return mask[:, None]


class ParallelEagleDrafter(EagleDrafter):
    """P-EAGLE: rows of masks behind the committed ones, so that all levels are known at
    once."""

    net: Eagle3Net

    def open(self, levels: int) -> Tensor:
        count, more = len(self.lengths), levels - 1
        state = self.h[:count, None]
        if more:
            places = self.cache.aim(slice(0, count), self.lengths, 0, more)
            mask = self.cache.back(places)
            e, g = self.net.masked((count, more), state.dtype)
            state = torch.cat([state, self._pass(e, g, places, mask[:, None])], 1)
        self.known = self.logits(state)
        return self.known[:, :1]

    def level(self, nodes: Nodes) -> Tensor:
        return self.known[:, nodes.level, None]  # the same for all nodes of a level
