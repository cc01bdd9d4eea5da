"""The drafter that needs no model: prompt lookup over whole suffixes, by a suffix automaton (Blumer
et al. 1985) that is built token by token: every part of a growing text that has been seen before,
and how it went on.

A state stands for all parts that end at the same places. Adding a token costs amortised
constant time, and so does finding the longest end of the text that occurred earlier: it is what
the last state's link stands for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

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
# Links that are followed from the end of the text to count its occurrences anew. A text that
# repeats one token has as many as tokens: there the shortest parts keep an older place.
COUNTED = 32
# How often a match of 1, 2 .. tokens, the longest there is, goes on as it did before: measured on
# 45 greedy answers to scripts/prompts/demo.jsonl (19 % of 983 single tokens, 40 % of 165 pairs).
GOES_ON = (0.19, 0.4, 0.57, 0.72, 0.8, 0.85)


class SuffixAutomaton:
    """The text so far. Places are numbers of tokens before them."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # place behind the latest occurrence that had ended before the last token
        self._count = [0]  # occurrences that had ended before the last token
        self._last = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._count_ends()
            self._append(token)

    def _count_ends(self) -> None:
        """The text goes on: what it ended with has now occurred here."""
        state, place = self._last, len(self.text)
        for _ in range(COUNTED):
            if state <= 0:
                return
            self._end[state] = place
            self._count[state] += 1
            state = self._link[state]

    def _append(self, token: int) -> None:
        fresh, above = self._state({}, 0, len(self.text) + 1), self._last
        while above >= 0 and token not in self._next[above]:
            self._next[above][token] = fresh
            above = self._link[above]
        if above >= 0:
            self._link[fresh] = self._split(above, token)
        self._last = fresh
        self.text.append(token)

    def _split(self, above: int, token: int) -> int:
        """Return the state of what `above` stands for and `token` behind it, alone."""
        old = self._next[above][token]
        if self._length[old] == self._length[above] + 1:
            return old
        part = self._state(dict(self._next[old]), self._link[old], self._length[above] + 1)
        self._end[part], self._count[part] = self._end[old], self._count[old]
        self._link[old] = part
        while above >= 0 and self._next[above].get(token) == old:
            self._next[above][token] = part
            above = self._link[above]
        return part

    def _state(self, following: dict[int, int], link: int, length: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(0)
        self._count.append(0)
        return len(self._link) - 1

    def latest(self, length: int) -> list[int]:
        """At most `length` tokens that followed the latest earlier occurrence of the longest end
        of the text that has one; [] where even the last token is new."""
        state = self._link[self._last]
        if state <= 0:
            return []
        return self.text[self._end[state] : self._end[state] + length]

    def branches(self, nodes: int, depth: int, least: float) -> list[tuple[int, int]]:
        """Return a tree of what followed the longest end of the text that occurred earlier:
        (token, number of the node above or -1) of at most `nodes` nodes, the likeliest
        first.

        A node counts as likely as the node above it, times how often a match of that length
        goes on as before, times its share of the occurrences. Nodes below `least`, and those
        deeper than `depth`, are left out."""
        found: list[tuple[int, int]] = []
        state = self._link[self._last]
        if state <= 0:
            return found
        # (-probability, order of discovery, token, its state, node above, its depth, match)
        waiting: list[tuple[float, int, int, int, int, int, int]] = []
        number = 0

        def open_up(state: int, above: int, level: int, match: int, probability: float) -> None:
            nonlocal number
            following = self._next[state]
            counts = [(max(self._count[s], 1), self._end[s], t, s) for t, s in following.items()]
            total = sum(count for count, *_ in counts)
            goes_on = probability * GOES_ON[min(match, len(GOES_ON)) - 1]
            for count, _, token, reached in heapq.nlargest(nodes, counts):
                likely = goes_on * count / total
                if likely < least:
                    break
                number += 1
                entry = (-likely, number, token, reached, above, level, match + 1)
                heapq.heappush(waiting, entry)

        open_up(state, -1, 1, self._length[state], 1.0)
        while waiting and len(found) < nodes:
            likely, _, token, reached, above, level, match = heapq.heappop(waiting)
            found.append((token, above))
            if level < depth:
                open_up(reached, len(found) - 1, level + 1, match, -likely)
        return found


class NGram:
    """Prompt lookup (Saxena 2023) over whole suffixes: continue as the longest end of the text
    that occurred earlier went on (SuffixAutomaton).

    nodes 0: a deterministic chain of at most `depth` tokens, as the latest occurrence went on.
    More: a deterministic tree of so many of the likeliest continuations, among all occurrences.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = DEPTH, nodes: int = 0) -> None:
        self.max_depth, self.max_nodes = depth, nodes or depth
        self.shape = "tree" if nodes else "chain"
        self.texts: list[SuffixAutomaton] = []

    def reset(self, rows: int, max_len: int) -> None:
        self.texts = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.device = prompts[0].device
        # the rest of the prompt arrives by observe
        self.texts += [SuffixAutomaton(p[:1].tolist()) for p in prompts]

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        fresh = zip(self.texts[rows], tokens.tolist(), n.tolist(), strict=True)
        for text, new, count in fresh:
            text.extend(new[:count])

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        allowed = [min(int(k), self.max_depth) for k in budget.tolist()]
        rows = zip(self.texts, allowed, strict=True)
        if self.shape == "tree":
            nodes = self.max_nodes
            trees = [text.branches(nodes, k, LEAST) if k > 0 else [] for text, k in rows]
            return listed(trees, self.device)
        found = [text.latest(k) if k > 0 else [] for text, k in rows]
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
    return DraftTree(tokens, parents, size, static_layout=TreeLayout(parents, depth, levels))
