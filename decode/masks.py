"""Attention masks of a tree pass: additive, built once per pass (static trees on even rows:
once ever).

Shape letters: B rows, n = N + 1 slots of a tree pass, M scratch offset, S = M + n
slots attended, G query heads per K/V head.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from outrider.decode import devices
from outrider.decode.tree import DraftTree, TreeLayout

# A layer type's reach: ("full", 0), ("window", W): W positions including its own, ("chunk",
# C): positions of one chunk.
Reach = tuple[str, int]
FULL: Reach = ("full", 0)


class TreeMasks:
    """Builds what a model takes as attention_mask: None, one additive mask, or one per layer
    type.

    reaches: layer type -> reach; more than one type gives a dictionary. tile: G where the
    attention function wants its rows tiled, else 1. Every row sees at least itself, so no
    softmax runs over nothing.
    """

    def __init__(
        self, reaches: dict[str, Reach], tile: int, dtype: torch.dtype, device: torch.device
    ):
        self.reaches, self.tile, self.dtype, self.device = reaches, tile, dtype, device
        self._strips: OrderedDict[int, tuple[TreeLayout, Tensor | None]] = OrderedDict()

    def __call__(self, lengths: list[int], tree: DraftTree) -> Tensor | dict[str, Tensor] | None:
        """lengths: committed tokens per row. Masks are [B or 1, 1, G * n, S]."""
        longest, n = max(lengths), tree.width + 1
        even = min(lengths) == longest
        bound = {
            kind: reach
            for kind, reach in self.reaches.items()
            if reach[0] != "full" and longest + n > reach[1]
        }
        if even and n == 1 and not bound:
            return None
        made: dict[Reach, Tensor] = {}
        if even and len(bound) < len(self.reaches) and tree.static_layout is not None:
            strip = self._strip(tree.static_layout, longest)
            if strip is not None:
                made[FULL] = strip
        missing = {bound.get(kind, FULL) for kind in self.reaches} - made.keys()
        if missing:
            made.update(self._build(lengths, tree, missing))
        masks = {kind: made[bound.get(kind, FULL)] for kind in self.reaches}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _build(
        self, lengths: list[int], tree: DraftTree, reaches: set[Reach]
    ) -> dict[Reach, Tensor]:
        longest, n, rows = max(lengths), tree.width + 1, len(lengths)
        ends = devices.send(lengths, self.device)
        slots = torch.arange(longest, device=self.device)
        seen = (slots < ends[:, None])[:, None, :].expand(rows, n, longest)
        allowed = torch.cat([seen, tree.layout.mask.expand(rows, n, n)], 2)
        made = {}
        for reach in reaches:
            near = allowed
            if reach[0] != "full":
                query = ends[:, None] + tree.layout.positions  # [B, n]
                key = torch.cat([slots.expand(rows, longest), query], 1)
                near = allowed & within(reach, query[:, :, None], key[:, None, :])
            made[reach] = self.additive(near)
        return made

    def additive(self, allowed: Tensor) -> Tensor:
        """[B, n, S] bool -> [B, 1, G * n, S], 0 where a token may look and as low as can be
        elsewhere."""
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~allowed, torch.finfo(self.dtype).min)
        return mask.repeat(1, self.tile, 1)[:, None]

    def _strip(self, layout: TreeLayout, longest: int) -> Tensor | None:
        """Even rows see all committed slots: the tree's block behind zeros, a suffix of one
        constant.

        None for a layout of single rows, and for one that is met for the first time: those of
        dynamic trees never come again, and a strip costs more than the mask of one pass.
        """
        n = layout.mask.shape[1]
        if layout.mask.shape[0] > 1:
            return None
        known = self._strips.pop(id(layout), None)
        strip = None if known is None else known[1]
        if known is not None and (strip is None or strip.shape[3] < longest + n):
            block = self.additive(layout.mask.to(self.device))
            room = max(512, 2 * longest)
            strip = torch.cat([block.new_zeros(*block.shape[:3], room), block], 3)
        # The layout is kept alive, so its id stays its own.
        self._strips[id(layout)] = (layout, strip)
        if len(self._strips) > 16:
            self._strips.popitem(last=False)
        if strip is None:
            return None
        view = strip[..., strip.shape[3] - longest - n :]
        return (
            view if view.device.type == "cpu" else view.contiguous()
        )  # GPU kernels want aligned strides


def within(reach: Reach, query: Tensor, key: Tensor) -> Tensor:
    """Whether a layer of that reach lets the position `query` look at the position `key`, which
    is not behind it."""
    kind, size = reach
    if kind == "window":
        return query - key < size
    return query // size == key // size
