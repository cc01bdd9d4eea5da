"""Several drafters, one draft: their trees are hung into one another and verified in one pass.

Where T > 0 only the first drafter draws, and draws as it would alone; the others give their most
probable tokens, as at T = 0. Their candidates hang behind the drawn siblings, as point masses: a
deterministic candidate may follow drawn ones (docs/lossless.md), and where it repeats one it is
that one, whose failure has left nothing of its token. So every node of the first drafter keeps
its place and its chance, and the others only add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.decode.checks import cut, non_finite
from outrider.decode.drafters import Drafter
from outrider.decode.ngram import listed
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree

# How all but the first draft, whatever the temperature.
MOST_PROBABLE = Sampling()


class Union:
    """Drafts of all `parts`, the first of which draws where T > 0. See decode.drafters.Drafter.

    Each gets what it would get alone: tokens, and of the features those of its own taps.
    """

    kind, shape = "union", "tree"

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = list(parts)
        self.name = "+".join(part.name for part in parts)
        self.taps = tuple(sorted({tap for part in parts for tap in part.taps}))
        self.max_depth = max(part.max_depth for part in parts)
        self.max_nodes = sum(part.max_nodes for part in parts)

    def reset(self, rows: int, max_len: int) -> None:
        for part in self.parts:
            # A pass over what was accepted is as wide as the row that accepted most, which may
            # be more than this part ever drafts; the shorter rows are padded.
            part.reset(rows, max_len + self.max_depth - part.max_depth)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        for place, part in enumerate(self.parts):
            part.begin(prompts, MOST_PROBABLE if place else sampling)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        for part in self.parts:
            own = feats if part.taps else None
            if own is not None and part.taps != self.taps:
                own = own[:, :, [self.taps.index(tap) for tap in part.taps]]
            part.observe(tokens, own, n, rows)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        trees = [
            part.propose(budget, MOST_PROBABLE if place else sampling, rng)
            for place, part in enumerate(self.parts)
        ]
        return joined(trees)

    def select(self, rows: list[int]) -> None:
        for part in self.parts:
            part.select(rows)


def joined(trees: Sequence[DraftTree]) -> DraftTree:
    """Return one tree of the nodes of all. Those of the first keep their numbers, their
    order among siblings and their distributions; the others, which must be deterministic,
    follow, each path that is there already being left where it is. A dynamic tree whose scores
    turn non-finite ends there."""
    trees = [tree if tree.score is None else cut(tree, non_finite(tree)) for tree in trees]
    first, *others = trees
    device, (count, width) = first.tokens.device, first.tokens.shape
    if not any(other.width for other in others):
        return first
    tables = [_table(tree) for tree in trees]
    rows = [_merged(parts) for parts in zip(*tables, strict=True)]
    if all(len(row) == len(own) for row, own in zip(rows, tables[0], strict=True)):
        return first
    most, tree = max(map(len, rows)), listed(rows, device)
    if first.sampled is None or first.proposal is None:
        return tree
    common = min(width, most)
    drawn = torch.arange(common, device=device) < first.size[:, None]
    sampled = torch.zeros(count, most, dtype=torch.bool, device=device)
    sampled[:, :common] = first.sampled[:, :common] & drawn
    probs_row = torch.zeros(count, most, dtype=torch.int64, device=device)
    probs_row[:, :common] = first.proposal.row[:, :common]
    return replace(tree, sampled=sampled, proposal=replace(first.proposal, row=probs_row))


def _table(tree: DraftTree) -> list[list[tuple[int, int]]]:
    """(token, number of the node above) of every row's nodes, in one read."""
    rows = torch.stack([tree.tokens, tree.parents], 2)
    sizes = tree.size.tolist()
    return [
        [(token, above) for token, above in row[:size]]
        for row, size in zip(rows.tolist(), sizes, strict=True)
    ]


def _merged(parts: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the nodes of one row: those of the first as they are, then those of the others
    that are on no path yet."""
    nodes = list(parts[0])
    number: dict[tuple[int, int], int] = {}
    for place, node in enumerate(nodes):
        number.setdefault(node, place)
    for part in parts[1:]:
        here: list[int] = []  # where each of its nodes is now
        for token, above in part:
            node = (token, here[above] if above >= 0 else -1)
            here.append(number.setdefault(node, len(nodes)))
            if here[-1] == len(nodes):
                nodes.append(node)
    return nodes
