"""The drafter behind heads that run decoder layers of their own (layers/head.py): keys and
values of these layers per row, and one state per row. EAGLE (heads/eagle/) and block heads
(heads/block/) say what is read and what is guessed.

Shape letters: B live rows, b rows of a pass, Hkv key heads, hd head size, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from outrider.decode import devices
from outrider.decode.grow import Form
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.base import Drafting
from outrider.heads.layers.head import LayeredHead
from outrider.heads.layers.layer import DraftNet, Rope


class DraftCache:
    """Keys and values [layers, rows, Hkv, slots, hd] of the draft layers; slot = position,
    rows end where they end. low, reach: the slots that the rows of a pass may look at, from
    low on; window: how far back they look, 0 = to the beginning. line: numbers from 0 on.
    ends: [b or 1, 1], where the rows of a pass end, however far ahead it writes."""

    window = 0

    def __init__(
        self, net: DraftNet, rows: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        c = net.config
        heads, size = int(c.num_key_value_heads or 0), int(c.head_dim or 0)
        shape = [c.num_hidden_layers, rows, heads, slots, size]
        # Zeros: a hidden slot has weight 0, and 0 * NaN would still be NaN. `update` writes none.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.rows, self.low, self.reach, self.start = slice(0, 0), 0, 0, 0
        self.slots: tuple[Tensor, Tensor] | None = None
        self.line = torch.arange(max(slots, rows) + 1, device=device)
        self.ends, self._ended = self.line[None, :1], [0]

    def aim(
        self, rows: slice, lengths: list[int], ahead: int, new: int, near: bool = True
    ) -> Tensor:
        """Let the next pass write `new` entries per row of `rows` from slot length + ahead on:
        returns [b or 1, new]. near: it looks at no slot before its window."""
        self.rows, self.reach, self.start = rows, max(lengths) + ahead + new, lengths[0] + ahead
        self.low = max(0, min(lengths) + 1 - self.window) if self.window and near else 0
        even = len(lengths) == 1 or min(lengths) == max(lengths)
        if even:
            self.slots = None
            self.ends, self._ended = self.line[None, lengths[0] : lengths[0] + 1], []
            return self.line[None, self.start : self.start + new]
        if self._ended != lengths:  # else another pass of the same cycle
            self.ends = devices.send(lengths, self.keys.device)[:, None]
            self._ended = list(lengths)
        place = self.ends + self.line[ahead : ahead + new]
        self.slots = (self.line[rows, None], place)
        return place

    def update(
        self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers' cache interface: write [b, Hkv, new, hd], return what the rows may
        look at."""
        out = []
        for buffer, given in ((self.keys[layer], key), (self.values[layer], value)):
            new = torch.nan_to_num(given, 0.0, 0.0, 0.0)
            if self.slots is None:
                buffer[self.rows, :, self.start : self.start + new.shape[2]] = new
            else:
                buffer[self.slots[0], :, self.slots[1]] = new.transpose(1, 2)
            out.append(buffer[self.rows, :, self.low : self.reach])
        return out[0], out[1]

    def hold(self, place: Tensor, reach: int) -> None:
        """Let the next pass write at slots `place` [b, new] of the first rows and look at the first
        slots, `reach` of them; the device alone knows where rows end."""
        self.rows, self.low, self.reach = slice(0, len(place)), 0, reach
        self.slots = (self.line[: len(place), None], place)

    def back(self, places: Tensor) -> Tensor:
        """[.., w] positions of rows -> [.., w, reach - low] bool, the slots that each may look
        at where slots are positions."""
        slot = self.line[self.low : self.reach]
        seen = slot <= places[..., None]
        return seen & (slot > places[..., None] - self.window) if self.window else seen

    def masked(self, places: Tensor) -> bool:
        """Return whether tokens at `places` [b or 1, new] that stand in a line need a mask:
        several behind others, single ones of rows that have several lengths, and where the
        window ends behind the first slot."""
        rows, new = places.shape
        cut = 0 < self.window < self.reach - self.low
        return cut or (self.reach > new if new > 1 else rows > 1)

    def select(self, rows: list[int], longest: int) -> None:
        """Move live rows `rows` to the front, in this order."""
        for buffer in (self.keys, self.values):
            buffer[:, : len(rows), :, :longest] = buffer[:, rows, :, :longest]


class CachedNet:
    """A copy of draft layers in the target's dtype, and their cache: row b has `lengths[b]`
    committed tokens in its first slots. graphs: the target's, None where passes are not captured.
    """

    cache: Any = None

    def __init__(self, net: Any, target: Target) -> None:
        self.net = copy.deepcopy(net)
        self.net.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.dtype, self.device = target.dtype, target.device
        self.graphs = target.graphs if target.capturing else None
        self.lengths: list[int] = []

    def room(self, rows: int, slots: int) -> None:
        """Forget everything; room for `rows` rows of `slots` tokens, or more where passes are
        captured in what there is."""
        have = self.cache.keys.shape if self.cache and self.graphs else (0,) * 5
        if rows > have[1] or slots > have[3]:
            with torch.inference_mode(False):  # graphs write to it in any mode
                self.cache = DraftCache(self.net, rows, slots, self.dtype, self.device)
            self.rope = torch.stack(self.net.rope(slots, self.dtype, self.device), 1)
        self.lengths = []

    def append(self, count: int) -> None:
        """Append empty rows."""
        self.lengths += [0] * count

    def turned(self, places: Tensor) -> Rope:
        """cos and sin [.., hd] of positions [..]."""
        found = self.rope[places]
        return found[..., 0, :], found[..., 1, :]

    def commit(self, rows: slice, counts: list[int]) -> Tensor:
        """Return the next pass reads committed tokens, so many of each row: their places [b
        or 1, new]."""
        lengths = self.lengths[rows]
        places = self.cache.aim(rows, lengths, 0, max(counts))
        self.lengths[rows] = [a + b for a, b in zip(lengths, counts, strict=True)]
        return places

    def last(self, counts: list[int]) -> Tensor:
        """[b] int64, flat places of each row's last token in such a pass; meaningless for a
        row without any."""
        new = max(counts)
        ends = [i * new + max(count, 1) - 1 for i, count in enumerate(counts)]
        return devices.send(ends, self.device)

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""
        if rows != list(range(len(rows))):
            self.cache.select(rows, max((self.lengths[r] for r in rows), default=0))
        self.lengths = [self.lengths[r] for r in rows]


class LayeredDrafter(CachedNet, Drafting):
    """A chain or tree drafter over a copy of the head's weights in the target's dtype. What
    draft layers share: their cache, and one state `h` per row."""

    def __init__(self, head: LayeredHead, target: Target, form: Form) -> None:
        CachedNet.__init__(self, head.net, target)
        Drafting.__init__(self, head, target, form)
        self.net.lm_head = None  # a copy of what is read below
        self.proj = head.projection(target).detach().to(self.dtype)  # [Vd, D]
        self.width = min(form.width, self.proj.shape[0])
        self.embed = functools.partial(vocab.table, target)
        self.most_rows = 0  # that are read at once behind the committed ones, whatever is drafted
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything; room for `rows` rows of `max_len` committed tokens and a draft
        behind them."""
        scratch = self.max_depth
        if self.shape == "tree":
            scratch = max(self.max_nodes, self.max_depth * self.width)
        self.room(rows, max_len + max(scratch, self.most_rows) + self.max_depth + 2)
        self.h = self.blank(rows)

    def blank(self, rows: int) -> Tensor:
        """Return the state of so many rows, empty."""
        raise TypeError("a subclass defines it")

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append empty rows. Raises ValueError where `reset` made room for fewer."""
        have, need = len(self.lengths), len(self.lengths) + len(prompts)
        if need > self.h.shape[0]:
            raise ValueError(f"begin: {need} rows, but reset made room for {self.h.shape[0]}")
        self.append(len(prompts))
        self.h[have:need] = 0

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        if rows != list(range(len(rows))):
            self.h[: len(rows)] = self.h[rows]
