"""Verification without a question to the device: the same as verify.py does where asking is free,
for all slots at once in place of those that a path has reached.

Shape letters: as in decode/verify.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.sampling import Law, Support
from decode.tree import DraftTree


class Coins(Protocol):
    """Of verify.Coins what is asked here."""

    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor: ...


class Judged(Protocol):
    """Of verify.Siblings what is asked here."""

    slots: Tensor
    used: Tensor | None

    def remains(self, at: Tensor) -> Support: ...


def walk(tree: DraftTree, law: Law, rng: Coins) -> tuple[Tensor, Tensor, Tensor]:
    """Path, length and bonus of verify.walk (`Verdict`): a token is drawn at every slot, each by
    its own number, and the path is that of nodes who are what was drawn above them."""
    count, n = tree.tokens.shape
    every = torch.arange(count, device=tree.tokens.device)
    slots = torch.arange(n + 1, device=tree.tokens.device).expand(count, -1)
    rows = every[:, None].expand(-1, n + 1).reshape(-1)
    support, lawless = law.read(rows, slots.reshape(-1))
    drawn = support.token(rng.draw(support.probs, rows, slots.reshape(-1) - 1)).view(count, -1)
    met = (drawn.gather(1, tree.parents + 1) == tree.tokens) & (slots[:, :n] < tree.size[:, None])
    met = F.pad(met, (1, 0), value=True)
    on = ~(tree.layout.mask & ~met[:, None]).any(2)  # [B, N + 1], the root is
    law.miss(rows, slots.reshape(-1), lawless & on.view(-1))
    deepest = torch.where(on, tree.positions() + 1, 0).argmax(1)
    path = tree.layout.paths.expand(count, -1, -1)[every, deepest]
    return path, on.sum(1) - 1, drawn.gather(1, deepest[:, None])[:, 0]


def slots_of(tree: DraftTree, inner: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and slots [B, I] that may have children (inner: `Inner.slots`), and which of them are
    there and have one: of a leaf, as where a budget ends, the law is asked for only if the path
    ends there. present: [B, N + 1] bool."""
    count = len(present)
    inner = inner.expand(count, -1)
    rows = torch.arange(count, device=present.device)[:, None].expand_as(inner)
    slots = inner.clamp(min=0)
    eldest = tree.layout.children[..., 0].expand(count, -1).gather(1, slots)
    parent = (eldest >= 0) & (eldest < tree.size[:, None])
    return rows, slots, (inner >= 0) & present.gather(1, slots) & parent


def bonus(law: Law, rng: Coins, end: Tensor, groups: Sequence[Judged]) -> Tensor:
    """verify._bonus: what is left and the law of a leaf are laid side by side, and every row draws
    from one. groups: one, of all slots with children, or none."""
    every = torch.arange(len(end), device=end.device)
    leaf = law.at(every, end)
    if not groups:
        return leaf.token(rng.draw(leaf.probs, every, end - 1))
    (siblings,) = groups
    hit = siblings.slots == end[:, None]
    hit = hit if siblings.used is None else hit & siblings.used
    left = siblings.remains(every * hit.shape[1] + hit.view(torch.uint8).argmax(1))
    here = hit.any(1, keepdim=True)
    short = leaf.probs.shape[1] - left.probs.shape[1]  # more of a law may have been looked at

    def chosen(left: Tensor, leaf: Tensor) -> Tensor:
        return torch.where(here, F.pad(left, (0, max(0, short))), F.pad(leaf, (0, max(0, -short))))

    ids = None if left.ids is None or leaf.ids is None else chosen(left.ids, leaf.ids)
    support = Support(ids, chosen(left.probs, leaf.probs.to(torch.float64)))
    return support.token(rng.draw(support.probs, every, end - 1))
