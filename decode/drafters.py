"""Drafters that need no training: none, n-gram (prompt lookup) and, in decode/draft_model.py, a
separate model. What a drafter is stands in decode/drafter.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.draft_model import DraftModel
from decode.drafter import Drafter, NoDraft
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


class NGram:
    """Prompt lookup (Saxena 2023) over whole suffixes: continue as the longest end of the text
    that occurred earlier went on (decode.suffix).

    nodes 0: a deterministic chain of at most `depth` tokens, as the latest occurrence went on.
    More: a deterministic tree of so many of the likeliest continuations, among all occurrences.
    least: candidates that are kept more rarely, as far as is known, are left out.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = DEPTH, nodes: int = 0, least: float = 0.0) -> None:
        self.max_depth, self.max_nodes, self.least = depth, nodes or depth, least
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
            least = self.least or LEAST
            trees = [text.branches(nodes, k, least) if k > 0 else [] for text, k in rows]
            return listed(trees, self.device)
        found = [text.latest(k, self.least) if k > 0 else [] for text, k in rows]
        width = max(map(len, found), default=0)
        tokens = torch.tensor([run + [0] * (width - len(run)) for run in found])
        return DraftTree.chain(
            tokens.to(self.device, torch.int64).view(len(found), width),
            torch.tensor([len(run) for run in found]),
        )

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[b] for b in rows]
