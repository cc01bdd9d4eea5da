"""Attention masks of a tree pass: additive, built once per pass.

Shape letters: B rows, n = N + 1 slots of a tree pass, M scratch offset, S = M + n
slots attended, G query heads per K/V head.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from outrider.decode import devices
from outrider.decode.tree import DraftTree

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

    def __call__(self, lengths: list[int], tree: DraftTree) -> Masks:
        """Masks [B or 1, 1, G * n, S] of a tree pass. lengths: committed tokens per row."""
        longest, n = max(lengths), tree.width + 1
        even, bound = min(lengths) == longest, self._bound(longest + n)
        if even and n == 1 and not bound:
            return None
        return self._build(lengths, (tree.layout.mask, tree.layout.positions), bound)

    def drafted(
        self, lengths: list[int], seen: Tensor | None, levels: list[int], new: int
    ) -> Masks:
        """Return masks [B, 1, G * new, S] of a pass over `new` drafted tokens that stand,
        behind those drafted before them, in slots from the longest row's end on.

        seen: [B or 1, new, R] bool, which of all R drafted tokens each may look at; None: all of
        them, `new` is 1. levels: of each of the R tokens, 1 = behind the last committed one."""
        longest = max(lengths)
        bound = self._bound(longest + max(levels))
        if min(lengths) == longest and seen is None and not bound:
            return None
        if seen is None:
            seen = torch.ones(1, new, len(levels), dtype=torch.bool, device=self.device)
        positions = devices.send([[level - 1 for level in levels]], self.device)
        return self._build(lengths, (seen, positions), bound)

    def _bound(self, reach: int) -> dict[str, Reach]:
        """Return the layer types that do not see all of so many positions."""
        return {k: r for k, r in self.reaches.items() if r[0] != "full" and reach > r[1]}

    def _build(
        self, lengths: list[int], behind: tuple[Tensor, Tensor], bound: dict[str, Reach]
    ) -> Masks:
        """behind: [B or 1, n, R] bool, which of the R slots behind the committed ones the last n
        of them may look at, and [B or 1, R] their positions, from 0."""
        block, positions = behind
        rows, n = len(lengths), block.shape[1]
        ends = devices.send(lengths, self.device)[:, None]
        slots = torch.arange(max(lengths), device=self.device).expand(rows, -1)
        committed = (slots < ends)[:, None].expand(-1, n, -1)
        allowed = torch.cat([committed, block.expand(rows, -1, -1)], 2)
        place = ends + positions
        query, key = place[:, -n:, None], torch.cat([slots, place], 1)[:, None]
        made = {
            reach: self.additive(allowed if reach == FULL else allowed & within(reach, query, key))
            for reach in {bound.get(kind, FULL) for kind in self.reaches}
        }
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
