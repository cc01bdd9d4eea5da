"""TreeMasks against a mask written out slot by slot."""

from __future__ import annotations

import pytest
import torch

from outrider.decode.masks import FULL, Reach, TreeMasks
from outrider.decode.tree import DraftTree, TreeShape
from tests.helpers.mirror import ancestors

SHAPE = TreeShape.of([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])


def written_out(lengths: list[int], tree: DraftTree, reach: Reach) -> torch.Tensor:
    """[B, n, S] bool, one question at a time: is it committed or an ancestor, and near enough?"""
    longest, n = max(lengths), tree.width + 1
    allowed = torch.zeros(len(lengths), n, longest + n, dtype=torch.bool)
    for b, end in enumerate(lengths):
        parents = tree.parents[b].tolist()
        for slot in range(n):
            path = ancestors(parents, slot - 1)
            here = end + len(path)
            seen = [(s, s) for s in range(end)] + [(longest, end)]
            seen += [(longest + 1 + node, end + 1 + depth) for depth, node in enumerate(path)]
            for key, position in seen:
                near = reach == FULL or (reach[0] == "window" and here - position < reach[1])
                near = near or (reach[0] == "chunk" and here // reach[1] == position // reach[1])
                allowed[b, slot, key] = near
    return allowed


@pytest.mark.parametrize(
    "reach, static",
    [(FULL, True), (("window", 7), False), (("window", 7), True), (("chunk", 7), True)],
)
def test_masks_equal_the_definition(reach: Reach, static: bool) -> None:
    """Every length around the window, even and ragged rows; static shapes come from one stored
    strip.
    """
    masks = TreeMasks(
        {"full_attention": FULL, "other": reach}, 3, torch.float32, torch.device("cpu")
    )
    for lengths in [[n] for n in range(1, 12)] + [[3, 3], [5, 2, 9], [600], [1500]]:
        for shape in (SHAPE, TreeShape.chain(3)):
            tree = DraftTree.static(shape, torch.zeros(len(lengths), len(shape), dtype=torch.int64))
            if not static:
                tree = DraftTree(tree.tokens, tree.parents, tree.size)
            ends = torch.tensor(lengths)[:, None]
            made = masks(lengths, ends, tree.layout.mask, tree.layout.positions)
            assert isinstance(made, dict)
            for kind, rule in (("full_attention", FULL), ("other", reach)):
                wanted = written_out(lengths, tree, rule)
                found = (made[kind] == 0).expand(
                    len(lengths), 1, 3 * wanted.shape[1], wanted.shape[2]
                )
                assert torch.equal(found[:, 0], wanted.repeat(1, 3, 1)), (lengths, kind)


@pytest.mark.parametrize("reach", [("window", 7), ("chunk", 7)])
def test_masks_of_drafted_tokens_equal_the_definition(reach: Reach) -> None:
    """Level by level, as a drafter with a cache scores them: every length around the window."""
    masks = TreeMasks({"other": reach}, 1, torch.float32, torch.device("cpu"))
    tree = DraftTree.static(SHAPE, torch.zeros(1, len(SHAPE), dtype=torch.int64))
    deep = [len(path) for path in SHAPE.paths]
    seen = tree.layout.mask[:, 1:, 1:]
    for end in range(1, 12):
        wanted = written_out([end], tree, reach)[:, 1:]  # of every node: committed, root, nodes
        for level in sorted(set(deep)):
            new = deep.count(level)
            read = sum(d <= level for d in deep)
            depth = torch.tensor([deep[:read]]) - 1
            some = seen[:, read - new : read, :read]
            made = masks([end + 1], torch.tensor([[end + 1]]), some, depth)
            requested = wanted[:, read - new : read, : end + 1 + read]
            found = torch.ones_like(requested) if made is None else (made == 0)[:, 0]
            assert torch.equal(found, requested), (end, level)
