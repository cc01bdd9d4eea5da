"""TreeCache: keys and values of many rows, a tree scored at a time, one path of it kept, the
rest dropped.

Row b's committed tokens fill slots 0 .. len_b - 1. The entries of a tree pass (last token + N
nodes) are written at one common scratch offset M = max(len): a slice copy per layer, no
scatter, and attention reads views. Committing moves the accepted path from scratch to len_b;
slots len_b .. M - 1 hold garbage that the mask hides. All layers of one shape share one
buffer, so that compaction is one gather and one scatter, not two per layer.

Shape letters: R live rows, L slots, Hkv heads, hd head size, D path length.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.decode import devices

LayerShape = tuple[int, int, int]  # Hkv, key size, value size


class _Layer(CacheLayerMixin):
    """What transformers asks about a layer when it builds masks of its own (prefill, chains).

    It knows its cache by a weak reference: in a cycle the buffers, gigabytes of them, would
    stay until Python looks for cycles, which numbers of objects decide and not their bytes."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int):
        super().__init__()
        self.cache, self.index, self.is_initialized = weakref.proxy(cache), index, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist before the first pass."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        return self.cache.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        return self.cache.offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.offset + int(query_length), 0

    def get_max_length(self) -> int:
        return self.cache.slots

    def get_max_cache_shape(self) -> int:
        """Return the name of get_max_length in older transformers."""
        return self.cache.slots


class TreeCache(Cache):
    """Pre-allocated K/V [max_rows, Hkv, L, hd] per layer, L = max_len + max_nodes + 1.

    rows: live rows, always a prefix. lengths: committed tokens per live row (host integers).
    finite: NaN and infinity are kept as 0: what one request's numbers overflow to does not meet
    the next one in its slots. places: [new] int64, where the pass under way writes; None: from
    `offset` on.
    """

    finite = False
    places: Tensor | None = None

    def __init__(
        self,
        shapes: list[LayerShape | None],
        max_rows: int,
        max_len: int,
        max_nodes: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.device = device
        self.max_rows, self.max_nodes, self.slots = max_rows, max_nodes, max_len + max_nodes + 1
        self.lengths: list[int] = []
        self.offset = 0  # scratch offset of the pass under way
        # Two tensors per layer (K, V), grouped by shape into one buffer [n, max_rows, Hkv, L, hd]
        # each.
        self._place: list[tuple[tuple[int, int], tuple[int, int]] | None] = []
        counts: dict[tuple[int, int], int] = {}
        for shape in shapes:
            if shape is None:
                self._place.append(None)
                continue
            spots = []
            for size in shape[1:]:
                number = counts.setdefault((shape[0], size), 0)
                spots.append((list(counts).index((shape[0], size)), number))
                counts[shape[0], size] += 1
            self._place.append((spots[0], spots[1]))
        # Zeros, not empty: a hidden slot has weight 0, and 0 * NaN would still be NaN.
        self.buffers = [
            torch.zeros(n, max_rows, heads, self.slots, size, dtype=dtype, device=device)
            for (heads, size), n in counts.items()
        ]
        # Per layer: keys and values [rows, Hkv, slots so far and of the pass under way, hd].
        self.views: list[tuple[Tensor, Tensor] | None] = []
        Cache.__init__(self, layers=[_Layer(self, i) for i in range(len(shapes))])

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def open(self, start: int, stop: int, offset: int, new: int) -> None:
        """Point the next pass at rows start..stop-1, writing `new` tokens per row at `offset`."""
        self.offset, self.places = offset, None
        self._view(slice(start, stop), offset + new)

    def hold(self, rows: int, size: int, places: Tensor) -> None:
        """Point the next pass at the first slots, `size` of them, of the first rows, live or not,
        writing at the slots `places` [new] int64. Its offset is not known to the host."""
        self.offset, self.places = 0, places
        self._view(slice(0, rows), size)

    def _view(self, rows: slice, size: int) -> None:
        read = [b[:, rows, :, :size].unbind(0) for b in self.buffers]
        self.views = [p and (read[p[0][0]][p[0][1]], read[p[1][0]][p[1][1]]) for p in self._place]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new K and V [rows, Hkv, new, hd]; return views of all up to them,
        no copy.
        """
        found = self.views[layer_idx]
        assert found is not None, f"layer {layer_idx} held no keys when the target was probed"
        for view, new in zip(found, (key_states, value_states), strict=True):
            new = new.nan_to_num(0, 0, 0) if self.finite else new
            if self.places is None:
                view[:, :, self.offset :].copy_(new)
            else:
                view.index_copy_(2, self.places, new)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.offset + int(query_length), 0

    def room(self, new: int) -> int:
        """Return the scratch offset M of a pass with `new` entries per row, for which a cache
        made for these rows and trees has room."""
        longest = max(self.lengths)
        assert longest + new <= self.slots, f"{longest} + {new} entries in {self.slots} slots"
        return longest

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Keep the last token and path[b, :length[b]] of the tree just scored; row b grows by
        1 + length[b], by none where that is -1.

        path: [R, D] int64 node numbers in depth order, padded with -1. length: [R] int64.
        """
        table = torch.cat([length[:, None], path], 1).tolist()  # the one host round trip
        moves = any(nodes[:count] != [*range(count)] for count, *nodes in table)
        if moves or min(self.lengths) < self.offset:
            deepest = max(count for count, *_ in table)
            self._compact([nodes[:deepest] for _, *nodes in table], deepest)
        self.lengths = [have + 1 + row[0] for have, row in zip(self.lengths, table, strict=True)]

    def _compact(self, paths: list[list[int]], deepest: int) -> None:
        """Move the path of every live row, `deepest` node numbers, from scratch to its end; padded
        places (-1) move the root's slot, garbage beyond the new end.
        """
        come = [[self.offset, *(self.offset + 1 + node for node in path)] for path in paths]
        if self.rows == 1:
            begin, source = self.lengths[0], devices.send(come[0], self.device)
            for buffer in self.buffers:
                buffer[:, 0, :, begin : begin + 1 + deepest] = buffer[:, 0].index_select(2, source)
            return
        moves = [
            [[row] * (deepest + 1), come[row], [*range(end, end + deepest + 1)]]
            for row, end in enumerate(self.lengths)
        ]
        row, source, target = devices.send(moves, self.device).unbind(1)
        for buffer in self.buffers:
            buffer[:, row, :, target] = buffer[:, row, :, source]

    def select(self, rows: list[int]) -> None:
        """Keep live rows `rows` in this order, drop the others; live rows stay a prefix."""
        moved = [(to, come) for to, come in enumerate(rows) if to != come]
        if moved:
            end = max(self.lengths[come] for _, come in moved)
            to, come = devices.send(moved, self.device).unbind(1)
            for buffer in self.buffers:
                buffer[:, to, :, :end] = buffer[:, come, :, :end]
        self.lengths = [self.lengths[row] for row in rows]
