"""Mirror: drives a TreeCache and checks every logit against plain passes of an untouched
model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.decode.guidance import Guided
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree

GARBAGE = -7  # what padding nodes carry: nothing may ever read it


def ancestors(parents: list[int], node: int) -> list[int]:
    """Node numbers from the root down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Mirror:
    """Rows as plain token lists beside the cache's rows: the last token of each is not in the
    cache yet.
    """

    def __init__(
        self,
        target: Target,
        oracle: Any,
        sizes: tuple[int, int, int],
        tolerance: float,
        seed: int = 0,
        guidance: float | None = None,
    ):
        """sizes: of the cache, as `new_cache` takes them."""
        self.target, self.oracle, self.tolerance = target, oracle, tolerance
        self.guidance = guidance
        self.scorer: Any = target if guidance is None else Guided(target, guidance)
        self.cache: Any = self.scorer.new_cache(*sizes)
        self.generator = torch.Generator().manual_seed(seed)
        self.texts: list[list[int]] = []
        self.others: list[list[int]] = []  # unconditional companions, under guidance

    def ids(self, n: int) -> list[int]:
        return torch.randint(3, self.target.vocab_size, (n,), generator=self.generator).tolist()

    @torch.no_grad()
    def plain(self, ids: list[int]) -> Tensor:
        """[V] logits after `ids`, no cache."""
        return self.oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]

    def distribution(self, row: int, more: list[int]) -> Tensor:
        wanted = self.plain(self.texts[row] + more)
        if self.guidance is None:
            return wanted
        cond = wanted.log_softmax(-1)
        free = self.plain(self.others[row] + more).log_softmax(-1)
        return free + self.guidance * (cond - free)

    def near(self, found: Tensor, wanted: Tensor, what: str) -> None:
        error = float((found - wanted).abs().max())
        assert error <= self.tolerance, f"{what}: logits differ by {error:.3g} > {self.tolerance}"

    def lengths(self) -> list[int]:
        """Committed tokens of every row, in the cache or behind it, companions left out."""
        cache, step = (self.cache, 1) if self.guidance is None else (self.cache.both, 2)
        behind = getattr(cache, "behind", [0] * cache.rows)
        return [have + more for have, more in zip(cache.lengths, behind, strict=True)][::step]

    def prefill(self, lengths: list[int], uncond: list[int] | None = None) -> None:
        """Append rows with random prompts of these lengths, then a first token each."""
        prompts = [self.ids(n) for n in lengths]
        companions = [p[-1:] for p in prompts] if uncond is None else [self.ids(n) for n in uncond]
        rows = prompts
        if self.guidance is not None:
            rows = [p for pair in zip(prompts, companions, strict=True) for p in pair]
        step = self.scorer.prefill(self.cache, [torch.tensor(p) for p in rows])
        assert step.logits.shape == (len(prompts), 1, self.target.vocab_size)
        for i, prompt in enumerate(prompts):
            self.texts.append(prompt)
            self.others.append(companions[i])
            self.near(step.logits[i, 0], self.distribution(len(self.texts) - 1, []), f"prefill {i}")
            first = self.ids(1)
            self.texts[-1] = self.texts[-1] + first
            self.others[-1] = self.others[-1] + first

    def score(self, parents: list[list[int]], taps: tuple[int, ...] = ()) -> tuple[DraftTree, Step]:
        """Score random tokens on `parents` (ragged, one list per row) and check every node in
        use.
        """
        n = max(map(len, parents))
        tokens = torch.full((len(parents), n), GARBAGE)
        table = torch.full((len(parents), n), -1)
        for b, row in enumerate(parents):
            tokens[b, : len(row)] = torch.tensor(self.ids(len(row)), dtype=torch.int64)
            table[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        tree = DraftTree(tokens, table, torch.tensor([len(row) for row in parents]))
        return tree, self.check(tree, taps)

    def check(self, tree: DraftTree, taps: tuple[int, ...] = ()) -> Step:
        step = self.scorer.score(self.cache, torch.tensor([t[-1] for t in self.texts]), tree, taps)
        assert step.logits.shape == (len(self.texts), tree.width + 1, self.target.vocab_size)
        for b in range(len(self.texts)):
            self.near(step.logits[b, 0], self.distribution(b, []), f"row {b}, last token")
            parents = tree.parents[b].tolist()
            for node in range(int(tree.size[b])):
                path = tree.tokens[b, ancestors(parents, node)].tolist()
                self.near(
                    step.logits[b, node + 1], self.distribution(b, path), f"row {b}, node {node}"
                )
        assert not step.logits.isnan().any(), "padding nodes must not turn into NaN"
        return step

    def commit(self, tree: DraftTree, nodes: list[int]) -> None:
        """Keep the path down to nodes[b] (-1: none of the tree) and add a bonus token to each
        row.
        """
        paths = [ancestors(tree.parents[b].tolist(), node) for b, node in enumerate(nodes)]
        depth = max(map(len, paths)) + 1  # one column of padding more than needed
        table = torch.tensor([p + [-1] * (depth - len(p)) for p in paths])
        self.cache.commit(table, torch.tensor([len(p) for p in paths]))
        for b, path in enumerate(paths):
            grown = tree.tokens[b, path].tolist() + self.ids(1)
            self.texts[b] = self.texts[b] + grown
            self.others[b] = self.others[b] + grown
        assert self.lengths() == [len(t) - 1 for t in self.texts]

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.texts = [self.texts[r] for r in rows]
        self.others = [self.others[r] for r in rows]
        assert self.lengths() == [len(t) - 1 for t in self.texts]
