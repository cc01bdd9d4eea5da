"""What a drafter is, and the three that need no training: none, n-gram (prompt lookup), a separate draft model.

A drafter sees committed tokens and the target features that predicted them, and proposes a DraftTree. Trained heads
(heads/) implement the same protocol. Whatever a drafter does, the output law is the target's: a broken one only
lowers acceptance, so acceptance has tests of its own.

Shape letters: B live rows, n tokens per row, K taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target, TreeCache
from decode.tree import DraftTree, Proposal


class Drafter(Protocol):
    """name: for tables. shape: "none", "chain" or "tree". taps: target features it wants (decode.target's numbering).

    max_depth: levels it may propose. max_nodes: nodes it may propose.
    """

    name: str
    shape: str
    taps: tuple[int, ...]
    max_nodes: int
    max_depth: int

    def reset(self, rows: int, max_len: int) -> None:
        """Forget everything. At most `rows` rows will live at once, each with at most `max_len` committed tokens."""

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append rows. prompts: 1-D int64, whole, first token included."""

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        """tokens: [b, n_max] newly committed tokens of live `rows`, n: [b] how many are real (padding behind).

        feats: [b, n_max, K, D], the features at the position BEFORE each token, those that predicted it. The first
        call for a row carries prompt[1:] and the first generated token.
        """

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft for every live row, at most budget[b] levels deep (0 is allowed). budget: [B] int64."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep these live rows in this order."""


class NoDraft:
    """Proposes nothing: plain autoregressive decoding through the same engine, the baseline of every table."""

    name, shape = "none", "none"
    taps: tuple[int, ...] = ()
    max_nodes = max_depth = 0

    def __init__(self) -> None:
        self.rows = 0

    def reset(self, rows: int, max_len: int) -> None:
        self.rows = 0

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.rows += len(prompts)

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        pass

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return DraftTree.empty(self.rows, budget.device)

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)


class NGram:
    """Prompt lookup (Saxena 2023): continue as the latest earlier occurrence of the last n tokens went on.

    The longest n from `longest` down to 1 that occurs wins. A deterministic chain of at most `depth` tokens.
    """

    name, shape = "ngram", "chain"
    taps: tuple[int, ...] = ()

    def __init__(self, depth: int = 10, longest: int = 3) -> None:
        self.max_nodes = self.max_depth = depth
        self.longest = longest
        self.ids: list[np.ndarray] = []

    def reset(self, rows: int, max_len: int) -> None:
        self.ids = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.ids += [p[:1].cpu().numpy() for p in prompts]  # the rest of the prompt arrives by observe

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        fresh = tokens.cpu().numpy()
        for b, new, count in zip(range(rows.start, rows.stop), fresh, n.tolist(), strict=True):
            self.ids[b] = np.concatenate([self.ids[b], new[:count]])

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        found = [self._lookup(ids)[: max(int(k), 0)] for ids, k in zip(self.ids, budget.tolist(), strict=True)]
        width = max(map(len, found))
        tokens = torch.zeros(len(found), width, dtype=torch.int64)
        for b, run in enumerate(found):
            tokens[b, : len(run)] = torch.from_numpy(run)
        return DraftTree.chain(tokens.to(budget.device), torch.tensor([len(f) for f in found], device=budget.device))

    def select(self, rows: list[int]) -> None:
        self.ids = [self.ids[b] for b in rows]

    def _lookup(self, ids: np.ndarray) -> np.ndarray:
        for n in range(min(self.longest, len(ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
            hits = np.flatnonzero((windows == ids[-n:]).all(1))
            if len(hits):
                start = hits[-1] + n
                return ids[start : start + self.max_depth]
        return ids[:0]


class DraftModel:
    """A separate small causal LM drafts a chain, one of its own passes per token (Leviathan et al. 2022).

    T = 0: its argmax. T > 0: sampled from its own law under the target's settings, so a step is accepted with
    probability 1 - TV. `draft` must share the target's tokenizer.
    """

    shape = "chain"
    taps: tuple[int, ...] = ()

    def __init__(self, draft: Target, depth: int = 5, name: str = "draft") -> None:
        self.draft, self.name = draft, name
        self.max_nodes = self.max_depth = depth
        self.ids: list[list[int]] = []  # committed tokens of each row
        self.cache: TreeCache | None = None

    def reset(self, rows: int, max_len: int) -> None:
        # The draft's cache also holds its own proposals; a pass reads at most the two tokens it has not seen.
        length = min(max_len + self.max_depth, self.draft.context_length)
        self.cache = self.draft.new_cache(rows, length, 2)
        self.ids = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.ids += [p[:1].tolist() for p in prompts]  # the rest of the prompt arrives by observe

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        for b, new, count in zip(range(rows.start, rows.stop), tokens.tolist(), n.tolist(), strict=True):
            # Of its own proposals the draft keeps those that were accepted; fresh rows are not in its cache yet.
            if b < self._cache.rows:
                read = self._cache.lengths
                agree = _common(self.drafted[b], new[: count - 1])  # the bonus token is always read again
                read[b] = min(read[b], len(self.ids[b]) + agree)
                self._cache.truncate(read)
            self.ids[b] += new[:count]

    def select(self, rows: list[int]) -> None:
        self._cache.select([b for b in rows if b < self._cache.rows])
        self.ids = [self.ids[b] for b in rows]

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        rows, device = len(self.ids), self.draft.device
        levels = max(int(budget.max()), 0)
        self.drafted: list[list[int]] = [[] for _ in range(rows)]
        if levels == 0:
            return DraftTree.empty(rows, budget.device)
        fresh = self.ids[self._cache.rows :]
        if fresh:
            self.draft.prefill(self._cache, [torch.tensor(ids[:-1], device=device) for ids in fresh])
        every = torch.arange(rows, device=device)
        tokens, laws = [], []
        logits = self._catch_up()
        for level in range(levels):
            if sampling.greedy:
                token = logits.argmax(-1)
            else:
                law = sampling.draft_law(logits)
                token = rng.draft(law, every, torch.full_like(every, level))
                laws.append(law)
            tokens.append(token)
            if level + 1 < levels:
                tree = DraftTree.empty(rows, device)
                logits = self.draft.score(self._cache, token, tree).logits[:, 0]
                self._cache.commit(tree.tokens, tree.size)
        chain = torch.stack(tokens, 1)
        self.drafted = chain.tolist()
        size = budget.clamp(0, levels)
        if sampling.greedy:
            return DraftTree.chain(chain, size)
        row = torch.arange(levels, device=device).expand(rows, levels)
        return DraftTree.chain(
            chain, size, torch.ones_like(chain, dtype=torch.bool), Proposal(torch.stack(laws, 1), row)
        )

    def _catch_up(self) -> Tensor:
        """Read the committed tokens that are not cached (one or two per row): next-token logits [B, V]."""
        new = [ids[read:] for ids, read in zip(self.ids, self._cache.lengths, strict=True)]
        width = max(map(len, new))
        ids = torch.tensor([n + [0] * (width - len(n)) for n in new], device=self.draft.device)
        size = torch.tensor([len(n) - 1 for n in new], device=self.draft.device)
        step = self.draft.score(self._cache, ids[:, 0], DraftTree.chain(ids[:, 1:], size))
        self._cache.commit(torch.arange(width - 1, device=ids.device).expand(len(new), -1), size)
        return step.logits[torch.arange(len(new), device=ids.device), size]

    @property
    def _cache(self) -> TreeCache:
        assert self.cache is not None, "reset() comes first"
        return self.cache


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
