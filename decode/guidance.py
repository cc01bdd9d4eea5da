"""Classifier-free guidance (Sanchez et al. 2306.17806, as in transformers): every request is two
rows of the batch, its own and a companion's, which reads another prompt and the same tokens behind
it. Their logits are combined before a distribution is made of them; nothing else knows of it.

Shape letters: R requests, N tree nodes, D path length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decode.cache import TreeCache
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeLayout


class Pairs:
    """The cache of a `Guided` target: what is kept of a request is kept of both its rows, 2 r and
    2 r + 1 of request r."""

    def __init__(self, both: TreeCache) -> None:
        self.both = both

    def commit(self, path: Tensor, length: Tensor) -> None:
        """As of TreeCache. path: [R, D] int64, length: [R] int64."""
        self.both.commit(path.repeat_interleave(2, 0), length.repeat_interleave(2))

    def select(self, rows: list[int]) -> None:
        """Keep these requests in this order."""
        self.both.select([row for request in rows for row in (2 * request, 2 * request + 1)])


class Guided:
    """A target whose logits are log-probabilities that are moved away, `scale` times, from those
    of the companion; float32 or wider."""

    def __init__(self, target: Target, scale: float) -> None:
        self.target, self.scale = target, scale

    def new_cache(self, max_rows: int, max_len: int, max_nodes: int) -> Pairs:
        """As of Scorer, for so many requests."""
        return Pairs(self.target.new_cache(2 * max_rows, max_len, max_nodes))

    def release(self, cache: Pairs) -> None:
        """As of Target."""
        self.target.release(cache.both)

    def prefill(self, cache: Pairs, prompts: Sequence[Tensor], taps: Sequence[int] = ()) -> Step:
        """As of Scorer, of a step per request. prompts: of every row, a request's own first."""
        return self._combined(self.target.prefill(cache.both, prompts, taps))

    def score(self, cache: Pairs, last: Tensor, tree: DraftTree, taps: Sequence[int] = ()) -> Step:
        """As of Scorer. last: [R], tree: of R rows."""
        layout, parts = tree.layout, (tree.tokens, tree.parents, tree.size)
        tokens, parents, size = (t.repeat_interleave(2, 0) for t in parts)
        if len(layout.parents) > 1:
            layout = TreeLayout(parents, layout.depth.repeat_interleave(2, 0), layout.levels)
        both = DraftTree(tokens, parents, size, static_layout=layout)
        return self._combined(self.target.score(cache.both, last.repeat_interleave(2), both, taps))

    def _combined(self, step: Step) -> Step:
        wide = step.logits.to(torch.promote_types(step.logits.dtype, torch.float32))
        own, free = wide.log_softmax(-1).unflatten(0, (-1, 2)).unbind(1)
        feats = None if step.feats is None else step.feats[::2]
        return Step(free + self.scale * (own - free), feats)
