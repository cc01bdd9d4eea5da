"""Attention masks of a pass behind a cache: additive, built once per pass.

Shape letters: B rows, n tokens of the pass, R tokens behind the committed ones so far, those n
last, M where they begin, S = M + R slots attended, G query heads per K/V head.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

# A layer type's reach: ("full", 0), ("window", W): W positions including its own, ("chunk",
# C): positions of one chunk.
Reach = tuple[str, int]
Masks = Tensor | dict[str, Tensor | None] | None
FULL: Reach = ("full", 0)


class TreeMasks:
    """Builds what a model takes as attention_mask: None, one additive mask, or one per layer
    type.

    reaches: layer type -> reach; more than one type gives a dictionary, with None for types that
    are no attention. tile: G where the attention function wants its rows tiled, else 1. Every row
    sees at least itself, so no softmax runs over nothing.
    """

    def __init__(
        self, reaches: dict[str, Reach], tile: int, dtype: torch.dtype, device: torch.device
    ):
        self.reaches, self.tile, self.dtype, self.device = reaches, tile, dtype, device

    def __call__(
        self, lengths: list[int], ends: Tensor, seen: Tensor | None, depth: Tensor
    ) -> Masks:
        """Return masks [B, 1, G * n, S] of a pass.

        lengths: committed tokens per row, ends [B, 1] the same on the device. seen: [B or 1, n, R]
        bool, which of the R tokens behind them each of the last n may look at; None: one token
        looks at all. depth: [B or 1, R] int64, distance of each from the row's end."""
        longest, behind = max(lengths), depth.shape[1]
        plain = seen is None or behind == 1
        if plain and min(lengths) == longest and not self._bound(longest + behind):
            return None
        if seen is None:
            seen = torch.ones(1, 1, behind, dtype=torch.bool, device=self.device)
        places = torch.arange(longest, longest + behind, device=self.device)
        query = ends + depth[:, -seen.shape[1] :]
        return self.build(ends, places, seen, depth, query, longest + behind)

    def _bound(self, reach: int) -> dict[str, Reach]:
        """Return the layer types that do not see all of so many positions."""
        return {k: r for k, r in self.reaches.items() if r[0] != "full" and reach > r[1]}

    def build(
        self, ends: Tensor, places: Tensor, seen: Tensor, depth: Tensor, query: Tensor, size: int
    ) -> Masks:
        """Return masks over `size` slots, by operations of the device alone. places: [R] int64
        slots of the tokens behind the committed ones. query: [B, n] int64 positions of the pass's
        own. The rest as of a call."""
        rows, bound = len(ends), self._bound(size)
        slots = torch.arange(size, device=self.device).expand(rows, -1)
        committed = (slots < ends)[:, None].expand(-1, seen.shape[1], -1)
        allowed = committed.index_copy(2, places, seen.expand(rows, -1, -1))
        made = {FULL: self.additive(allowed)} if len(bound) < len(self.reaches) else {}
        if bound:
            key = slots.index_copy(1, places, (ends + depth).expand(rows, -1))[:, None]
            for reach in {*bound.values()}:
                made[reach] = self.additive(allowed & within(reach, query[:, :, None], key))
        masks: dict[str, Tensor | None] = {k: made[bound.get(k, FULL)] for k in self.reaches}
        return defaultdict(lambda: None, masks) if len(masks) > 1 else next(iter(masks.values()))

    def additive(self, allowed: Tensor) -> Tensor:
        """[B, n, S] bool -> [B, 1, G * n, S], 0 where a token may look and as low as can be
        elsewhere."""
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)
        return mask.repeat(1, self.tile, 1)[:, None]


def within(reach: Reach, query: Tensor, key: Tensor) -> Tensor:
    """Return whether a layer of that reach lets the position `query` look at the position
    `key`, which is not behind it."""
    kind, size = reach
    if kind == "window":
        return query - key < size
    return query // size == key // size
