"""The drafter that needs no model: prompt lookup (Saxena 2023) over whole suffixes. The longest end
of the text that occurred earlier is found, and how it went on is drafted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, TreeLayout

DEPTH = 10  # levels of an n-gram's draft, and nodes of its tree

# A candidate less likely than this costs a target pass about as much as it brings: on two cores
# a node adds 1 to 2 % to a pass over weights as they were loaded. Over packed ones it adds about
# 6 %, on a GPU next to nothing.
LEAST = 0.02
LONGEST, MOST = 16, 64  # tokens of a match, longer ones count as equal; matches, the latest ones
# How often a match of 1, 2 .. tokens, the longest there is, goes on as it did before: measured on
# 45 greedy answers to scripts/prompts/demo.jsonl (19 % of 983 single tokens, 40 % of 165 pairs).
GOES_ON = (0.19, 0.4, 0.57, 0.72, 0.8, 0.85)


def matches(text: np.ndarray) -> tuple[list[int], int]:
    """Return the places in `text` [n] where its longest end that occurred earlier went on, in
    ascending order, and how long that end is; none and 0 where even the last token is new."""
    places, length = np.flatnonzero(text[:-1] == text[-1]) + 1, 0
    found = places[:0]
    while len(places):
        found, length = places, length + 1
        if length == LONGEST:
            break
        places = places[places > length]
        places = places[text[places - length - 1] == text[-length - 1]]
    return found[-MOST:].tolist(), length


def latest(text: np.ndarray, depth: int) -> list[int]:
    """Return at most `depth` tokens that followed the latest match."""
    places, _ = matches(text)
    return text[places[-1] : places[-1] + depth].tolist() if places else []


def branches(text: np.ndarray, nodes: int, depth: int, least: float) -> list[tuple[int, int]]:
    """Return a tree of what followed all matches: (token, number of the node above or -1) of at
    most `nodes` nodes, the likeliest first.

    A node counts as likely as the node above it, times how often a match of that length goes on
    as before, times its share of the matches. Nodes below `least`, and those deeper than
    `depth`, are left out."""
    found: list[tuple[int, int]] = []
    # (-probability, order of discovery, token, places behind it, node above, its depth)
    waiting: list[tuple[float, int, int, list[int], int, int]] = []
    number, (places, match) = 0, matches(text)

    def open_up(places: list[int], above: int, level: int, probability: float) -> None:
        nonlocal number
        behind = dict[int, list[int]]()
        for place, token in zip(places, text[places].tolist(), strict=True):
            behind.setdefault(token, []).append(place + 1)
        goes_on = probability * GOES_ON[min(match + level, len(GOES_ON)) - 1]
        counts = ((len(after), after[-1], token) for token, after in behind.items())
        for count, _, token in heapq.nlargest(nodes, counts):
            likely = goes_on * count / len(places)
            if likely < least:
                break
            number += 1
            heapq.heappush(waiting, (-likely, number, token, behind[token], above, level + 1))

    if places and depth > 0:
        open_up(places, -1, 0, 1.0)
    while waiting and len(found) < nodes:
        likely, _, token, places, above, level = heapq.heappop(waiting)
        found.append((token, above))
        if places[-1] == len(text):
            places = places[:-1]
        if level < depth and places:
            open_up(places, len(found) - 1, level, -likely)
    return found


class NGram:
    """nodes 0: a deterministic chain of at most `depth` tokens, as the latest match went on. More:
    a deterministic tree of so many of the likeliest continuations, among all matches.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = DEPTH, nodes: int = 0) -> None:
        self.max_depth, self.max_nodes = depth, nodes or depth
        self.shape = "tree" if nodes else "chain"
        self.texts: list[np.ndarray] = []

    def reset(self, rows: int, max_len: int) -> None:
        self.texts = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.device = prompts[0].device
        # the rest of the prompt arrives by observe
        self.texts += [prompt[:1].cpu().numpy() for prompt in prompts]

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        new = zip(self.texts[rows], tokens.cpu().numpy(), n.tolist(), strict=True)
        self.texts[rows] = [np.concatenate([text, row[:count]]) for text, row, count in new]

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        rows = zip(self.texts, budget.clamp(0, self.max_depth).tolist(), strict=True)
        if self.shape == "tree":
            trees = [branches(text, self.max_nodes, depth, LEAST) for text, depth in rows]
            return listed(trees, self.device)
        found = [latest(text, depth) for text, depth in rows]
        width = max(map(len, found), default=0)
        tokens = torch.tensor([run + [0] * (width - len(run)) for run in found])
        return DraftTree.chain(
            tokens.to(self.device, torch.int64).view(len(found), width),
            torch.tensor([len(run) for run in found]),
        )

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[b] for b in rows]


def listed(rows: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> DraftTree:
    """Return a deterministic tree per row from its nodes: (token, number of the node above
    or -1), a node behind the one above it."""
    width = max(map(len, rows), default=0)
    if not width:
        return DraftTree.empty(len(rows), device)
    table = []  # of every row: tokens, parents, depths
    for nodes in rows:
        depths = list[int]()
        for _, above in nodes:
            depths.append(0 if above < 0 else depths[above] + 1)
        padding = [(0, -1, 0)] * (width - len(nodes))
        known = [(*node, depth) for node, depth in zip(nodes, depths, strict=True)]
        table.append([*zip(*known, *padding, strict=True)])
    tokens, parents, depth = torch.tensor(table, device=device).unbind(1)
    levels = 1 + max(max(row[2]) for row in table)
    size = torch.tensor([len(row) for row in rows], device=device)
    return DraftTree(tokens, parents, size, static_layout=TreeLayout(parents, depth, levels))
