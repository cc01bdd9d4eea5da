"""The drafter behind heads that run decoder layers of their own (layers/head.py): their cache,
and one state per row. EAGLE (heads/eagle/) and block heads (heads/block/) say what is read and
what is guessed.

Shape letters: B live rows.
"""

from __future__ import annotations

import functools

from torch import Tensor

from outrider.decode.grow import Form
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.drafting import Drafting
from outrider.heads.layers.cache import CachedNet
from outrider.heads.layers.head import LayeredHead


class LayeredDrafter(CachedNet, Drafting):
    """A chain or tree drafter over a copy of the head's weights in the target's dtype. See
    decode.drafters.Drafter. What draft layers share: their cache, and one state `h` per row.
    blind: no level looks at a drafted token, and `open` leaves the logits of all in `known`.
    """

    blind = False
    known: Tensor

    def __init__(self, head: LayeredHead, target: Target, form: Form) -> None:
        CachedNet.__init__(self, head.net, target)
        Drafting.__init__(self, head, target, form)
        self.net.lm_head = None  # a copy of what is read below
        self.proj = head.projection(target).detach().to(self.dtype)  # [Vd, D]
        self.width = min(form.width, self.proj.shape[0])
        self.embed = functools.partial(head.embed, target)
        self.most_rows = 0  # that are read at once behind the committed ones, whatever is drafted
        self.reset(1, 1)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything; room for `rows` rows of `max_len` committed tokens and a draft
        behind them.
        """
        scratch = self.max_depth
        if self.shape == "tree":
            scratch = max(self.max_nodes, self.max_depth * self.width)
        self.room(rows, max_len + max(scratch, self.most_rows) + self.max_depth + 2)
        self.h = self.blank(rows)

    def blank(self, rows: int) -> Tensor:
        """The state of so many rows, empty."""
        raise TypeError("a subclass defines it")

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append rows; what they hold comes with observe. Makes room where reset was told of
        less.
        """
        have, need = len(self.lengths), len(self.lengths) + len(prompts)
        if need > self.h.shape[0]:
            raise ValueError(f"begin: {need} rows, but reset made room for {self.h.shape[0]}")
        self.append(len(prompts))
        self.h[have:need] = 0

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""
        super().select(rows)
        if rows != list(range(len(rows))):
            self.h[: len(rows)] = self.h[rows]

    def at_once(self, levels: int) -> Tensor | None:
        """See decode.grow.LevelSource."""
        if not self.blind:
            return None
        self.open(levels)
        return self.known
