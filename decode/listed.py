"""Deterministic trees given node by node, as drafters without a law have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode.tree import DraftTree, Layout


def listed(rows: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> DraftTree:
    """A deterministic tree per row from its nodes: (token, number of the node above or -1), a
    node behind the one above it."""
    width = max(map(len, rows), default=0)
    if not width:
        return DraftTree.empty(len(rows), device)
    depths: list[list[int]] = []
    for nodes in rows:
        depths.append([])
        for _, above in nodes:
            depths[-1].append(0 if above < 0 else depths[-1][above] + 1)
    table = torch.tensor(
        [
            [
                [token for token, _ in row] + [0] * (width - len(row)),
                [above for _, above in row] + [-1] * (width - len(row)),
                depth + [0] * (width - len(row)),
            ]
            for row, depth in zip(rows, depths, strict=True)
        ],
        device=device,
    )
    tokens, parents, depth = table.unbind(1)
    levels = 1 + max(max(d, default=0) for d in depths)
    size = torch.tensor([len(row) for row in rows], device=device)
    return DraftTree(tokens, parents, size, static_layout=Layout.of(parents, depth, levels))
