"""What a drafter is, and those that need no training: none and n-gram (prompt lookup). A
separate draft model stands in decode/draft_model.py.

A drafter sees committed tokens and the target features that predicted them, and proposes a
DraftTree. Trained heads (heads/) implement the same protocol. Whatever a drafter does, the
output law is the target's: a broken one only lowers acceptance, so acceptance has tests of its
own.

Shape letters: B live rows, n tokens per row, K taps, D hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from decode.draft_model import DraftModel
from decode.listed import listed
from decode.rng import Rng
from decode.sampling import Sampling
from decode.suffix import SuffixAutomaton
from decode.tree import DraftTree

__all__ = ["DraftModel", "Drafter", "NGram", "NoDraft"]

DEPTH = 10  # levels of an n-gram's draft, and nodes of its tree

# A candidate less likely than this costs a target pass about as much as it brings: on two cores
# a node adds 1 to 2 % to a pass over weights as they were loaded. Over packed ones it adds about
# 6 %, on a GPU next to nothing.
LEAST = 0.02


class Drafter(Protocol):
    """name: for tables. shape: "none", "chain" or "tree". taps: target features it wants
    (decode.target's numbering).

    max_depth: levels it may propose. max_nodes: nodes it may propose.
    """

    name: str
    shape: str
    taps: tuple[int, ...]
    max_nodes: int
    max_depth: int

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything. At most `rows` rows will live at once, each with at most
        `max_len` committed tokens.
        """

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append rows. prompts: 1-D int64, whole, first token included."""

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens: [b, n_max] newly committed tokens of live `rows`, n: [b] int64 on the host,
        how many are real (padding behind).

        feats: [b, n_max, K, D], the features at the position BEFORE each token, those that
        predicted it. The first call for a row carries prompt[1:] and the first generated
        token.
        """

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft for every live row, at most budget[b] levels deep (0 is allowed). budget:
        [B] int64 on the host.
        """
        ...

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""


class NoDraft:
    """Proposes nothing: plain autoregressive decoding through the same engine, the baseline of
    every table.
    """

    name, shape = "none", "none"
    taps: tuple[int, ...] = ()
    max_nodes = max_depth = 0

    def __init__(self) -> None:
        self.rows = 0

    def reset(self, rows: int, max_len: int) -> None:
        self.rows = 0

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.rows, self.device = self.rows + len(prompts), prompts[0].device

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        pass

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return DraftTree.empty(self.rows, self.device)

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)


class NGram:
    """Prompt lookup (Saxena 2023) over whole suffixes: continue as the longest end of the text
    that occurred earlier went on (decode.suffix).

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
