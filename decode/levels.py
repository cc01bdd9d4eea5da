"""How a static shape is drafted: what each of its levels hangs below, worked out once a shape.

Shape letters: P parents, N nodes, n nodes of one level.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.decode.tree import TreeShape

Kids = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Level:
    """How the nodes of one level of a static shape hang below those of the level before that
    have children, the P parents (the committed token alone at depth 0).

    nodes: theirs. width: most children of one. kids: the children of each parent
    in draw order. parent, rank: [n] int64 place of a node's parent among the parents, and its
    own among its siblings. parents: [P] their node numbers. above, seen: as in `Nodes`.
    distribution: [P] which of the distributions that are given is that of a parent's children;
    None: its own, or the one.
    """

    depth: int
    nodes: slice
    width: int
    kids: tuple[tuple[int, ...], ...]
    parent: Tensor
    rank: Tensor
    parents: slice | Tensor
    above: Tensor | None
    seen: Tensor | None
    distribution: Tensor | None = None


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
def probs_rows(shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N] int64: the distribution that each node is drawn from, where a level has one, and where
    every parent has its own."""
    parents = list(dict.fromkeys(path[:-1] for path in shape.paths))
    return (
        torch.tensor([len(path) - 1 for path in shape.paths], device=device),
        torch.tensor([parents.index(path[:-1]) for path in shape.paths], device=device),
    )


@functools.lru_cache(maxsize=1024)
def turns_of(
    kids: Kids, count: int, device: torch.device
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
    """[P] the parents, those with more children in front, and for each rank of children the row
    and the number [count * P'] of each, row by row in the order of their parents."""
    order, ranks = _ranked(kids)
    row = torch.arange(count, device=device)
    return (
        torch.tensor(order, device=device),
        tuple(
            (row.repeat_interleave(len(n)), torch.tensor(n, device=device).repeat(count))
            for n in ranks
        ),
    )


def _ranked(kids: Kids) -> tuple[list[int], list[list[int]]]:
    """The parents, those with more children in front, and the numbers of the children of each
    rank in their order."""
    order = sorted(range(len(kids)), key=lambda j: -len(kids[j]))
    ranks = range(len(kids[order[0]]))
    return order, [[kids[j][rank] for j in order if len(kids[j]) > rank] for rank in ranks]


@functools.lru_cache(maxsize=1024)
def nodes_of(kids: Kids, device: torch.device) -> Tensor:
    """[K] numbers of all children, rank by rank."""
    return torch.tensor([number for rank in _ranked(kids)[1] for number in rank], device=device)


@functools.lru_cache(maxsize=256)
def merged(shape: TreeShape, device: torch.device) -> Level:
    """All levels as one, for distributions that look at no drafted token: the parents of all of
    them, each with the distribution of its children's level."""
    levels = levels_of(shape, device)
    depth = [level.depth for level in levels for _ in level.kids]
    return replace(
        levels[0],
        nodes=slice(0, len(shape)),
        width=max(level.width for level in levels),
        kids=tuple(kids for level in levels for kids in level.kids),
        distribution=None
        if depth == list(range(shape.depth))
        else torch.tensor(depth, device=device),
    )


@functools.lru_cache(maxsize=256)
def own(width: int, device: torch.device) -> Tensor:
    """[W, W] bool: nodes of a level are not above each other."""
    return torch.eye(width, dtype=torch.bool, device=device)


@functools.lru_cache(maxsize=256)
def depths_of(depths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(depths, device=device)
