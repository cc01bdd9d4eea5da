"""How a static shape is drafted: what each of its levels hangs below, worked out once a shape.

Shape letters: P parents, N nodes, n nodes of one level.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.tree import TreeShape


@dataclass(frozen=True)
class Level:
    """How the nodes of one level of a static shape hang below those of the level before that
    have children, the P parents (the committed token alone at depth 0).

    nodes, number: theirs, [n]. width: most children of one. kids: the children of each parent
    in draw order. parent, rank: [n] int64 place of a node's parent among the parents, and its
    own among its siblings. parents: [P] their node numbers. above, seen: as in `Nodes`.
    """

    depth: int
    nodes: slice
    number: Tensor
    width: int
    kids: tuple[tuple[int, ...], ...]
    parent: Tensor
    rank: Tensor
    parents: slice | Tensor
    above: Tensor | None
    seen: Tensor | None


@functools.lru_cache(maxsize=256)
def levels_of(shape: TreeShape, device: torch.device) -> tuple[Level, ...]:
    """Every level of a shape, the first one first."""
    number = {path: i for i, path in enumerate(shape.paths)}
    before: list[tuple[int, ...]] = [()]  # parents of the level before
    read: list[int] = []  # nodes that were parents so far
    found = []
    for depth in range(shape.depth):
        nodes = shape.level(depth)
        paths = [shape.paths[i] for i in nodes]
        parents = list(dict.fromkeys(path[:-1] for path in paths))
        kids = [tuple(i for i in nodes if shape.paths[i][:-1] == parent) for parent in parents]
        numbers = [number[parent] for parent in parents] if depth else []
        read += numbers
        seen = None
        if depth and shape != TreeShape.chain(len(shape)):
            mask = shape.layout(device).mask[:, 1:, 1:]
            seen = mask[:, numbers][:, :, read]
        above = [before.index(path[:-1]) for path in parents] if depth else [0]
        same = above == list(range(len(before)))
        found.append(
            Level(
                depth=depth,
                nodes=slice(nodes.start, nodes.stop),
                number=torch.tensor(nodes, device=device),
                width=max(map(len, kids)),
                kids=tuple(kids),
                parent=torch.tensor([parents.index(path[:-1]) for path in paths], device=device),
                rank=torch.tensor([path[-1] for path in paths], device=device),
                parents=_indices(numbers, device),
                above=None if same else torch.tensor(above, device=device),
                seen=seen,
            )
        )
        before = parents if depth else [()]
    return tuple(found)


def _indices(numbers: list[int], device: torch.device) -> slice | Tensor:
    """Neighbours as a slice, which costs no gathering."""
    first = numbers[0] if numbers else 0
    if numbers == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers, device=device)


@functools.lru_cache(maxsize=256)
def law_rows(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N] int64: the law that each node is drawn from, where a level has one, and where every
    parent has its own."""
    parents = list(dict.fromkeys(path[:-1] for path in shape.paths))
    return (
        torch.tensor([len(path) - 1 for path in shape.paths], device=device),
        torch.tensor([parents.index(path[:-1]) for path in shape.paths], device=device),
    )
