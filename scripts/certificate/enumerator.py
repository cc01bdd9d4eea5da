"""Walk every branch of drafting and verification, many at once, and add up the exact
distribution of what comes out.

`Branches` replaces decode.rng.Rng, and the code under test runs unchanged. scripts/certify.py
uses it, and the tests, which do the same for the whole decode loop.

Shape letters: B rows (branches), N nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.decode.checks import validate
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import Verdict

SCHEMES = ("top", "iid", "without", "hybrid")  # how siblings are drafted: see Case
POSSIBLE = 1e-12  # probability below which an outcome is not walked


Address = tuple[int, str, int, int]  # cycle, purpose, node, how often it was asked before
Script = dict[Address, int]  # how random choices went


class Branches:
    """One round of branches, in place of decode.rng.Rng: every random choice is one of
    finitely many outcomes. scripts: how the choices of each branch go; where one does not
    say, the first possible outcome is taken, and the others become scripts of the next
    round (`new`). weight: the probability of each branch. levels: draft levels that matter,
    per row; deeper draws are padding."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts, self.new = scripts, list[Script]()
        self.taken: list[Script] = [{} for _ in scripts]
        self.weight = [1.0] * len(scripts)
        self.branches, self.cycles = list(range(len(scripts))), [0] * len(scripts)
        self.asked = Counter[tuple[int, str, int]]()
        self.levels: list[int] | None = None

    def coins(self, seed: int, requests: Tensor, cycles: Tensor) -> Any:
        """Return the same branches in one cycle of the decode loop, whose row b is branch
        requests[b]."""
        here = copy.copy(self)
        here.branches, here.cycles, here.asked = requests.tolist(), cycles.tolist(), Counter()
        return here

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        p = probability.to(torch.float64).clamp(0, 1)
        before = torch.cat([torch.ones_like(p[:, :1]), (1 - p).cumprod(1)[:, :-1]], 1)
        # Outcomes are noted as nodes: where nodes stand depends on the rows beside them.
        place = (node + 1).argsort(1)
        distribution = (p * before).gather(1, place)
        chosen = self._choose("first", distribution, rows, torch.zeros_like(rows))
        return place.gather(1, chosen[:, None])[:, 0]

    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self._choose("draw", weights, rows, node)

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self._choose("draft", weights, rows, node)

    def _choose(self, purpose: str, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        """Outcomes [K] of weights [K, S] whose sums need not be 1."""
        weights = weights.to(torch.float64)
        total = weights.sum(-1, keepdim=True)
        out = []
        for p, row, number in zip(
            weights / torch.where(total == 0, 1.0, total), rows.tolist(), node.tolist(), strict=True
        ):
            # A batch of another size rounds otherwise: what is possible there at 1e-16 alone must
            # not open a branch that is certain here.
            options, branch = (p > POSSIBLE).nonzero()[:, 0].tolist(), self.branches[row]
            again = self.asked[row, purpose, number]
            self.asked[row, purpose, number] += 1
            padding = purpose == "draft" and self.levels is not None and number >= self.levels[row]
            # No choice, or a distribution that has run out of tokens: a batch may ask a row that
            # is already done.
            if len(options) <= 1 or padding:
                out.append(options[0] if options else 0)
                continue
            address, taken = (self.cycles[row], purpose, number, again), self.taken[branch]
            pick = self.scripts[branch].get(address)
            if pick is None:
                pick = options[0]
                self.new += [{**taken, address: other} for other in options[1:]]
            taken[address] = pick
            self.weight[branch] *= float(p[pick])
            out.append(pick)
        return torch.tensor(out, dtype=torch.int64)


@dataclass
class Drafted:
    """How a static tree is drafted from a table of distributions [contexts, Vd]; scheme,
    ids: see Case. child(context [B], token [B]) is the context behind a token."""

    shape: TreeShape
    scheme: str
    distributions: Tensor
    child: Callable[[Tensor, Tensor], Tensor]
    ids: Tensor | None = None

    def tree(self, begin: Tensor, size: Tensor | None, rng: Any) -> tuple[DraftTree, Tensor]:
        """Return the tree of every row, whose drafts begin in these contexts [B], and the
        context [B, N + 1] of every slot."""
        rows, n = len(begin), len(self.shape)
        parents = self.shape.parents(torch.device("cpu"))[0].tolist() if n else []
        every = torch.arange(rows)
        tokens = torch.zeros(rows, n, dtype=torch.int64)
        context = torch.zeros(rows, n + 1, dtype=torch.int64)
        context[:, 0] = begin
        sampled = torch.zeros(rows, n, dtype=torch.bool)
        distribution = self.distributions.new_zeros(rows, n + 1, self.distributions.shape[1])
        distribution[:, :, 0] = 1
        left: dict[int, Tensor] = {}
        for i, parent in enumerate(parents):
            slot, rank = parent + 1, self.shape.paths[i][-1]
            if rank == 0:
                distribution[:, slot] = left[slot] = self.distributions[context[:, slot]]
            if self.scheme == "top" or (self.scheme == "hybrid" and rank == 0):
                place = left[slot].argmax(1)
            else:
                place = rng.draft(left[slot], every, torch.full((rows,), i))
                sampled[:, i] = True
            if self.scheme != "iid":
                left[slot] = left[slot].scatter(1, place[:, None], 0.0)
            tokens[:, i] = place if self.ids is None else self.ids[place]
            context[:, i + 1] = self.child(context[:, slot], tokens[:, i])
        row = (torch.tensor(parents, dtype=torch.int64) + 1).expand(rows, n)
        proposal = Proposal(distribution, row, self.ids, self.scheme == "iid")
        return DraftTree.static(self.shape, tokens, size, sampled, proposal), context


@dataclass
class Case:
    """A small model: target and draft logits for every context of up to `shape.depth` tokens
    over V tokens.

    scheme: how siblings are drafted: "top" (deterministic), "iid", "without" (replacement) or
    "hybrid" (one deterministic candidate, the rest drawn from what is left). draft_vocab: ids
    the drafter knows.
    """

    vocab: int
    shape: TreeShape
    scheme: str
    sampling: Sampling
    target: Tensor  # [contexts, V] float64 logits
    draft: Tensor  # [contexts, Vd] float64 logits
    draft_vocab: Tensor | None = None
    size: int | None = None

    def child(self, context: Any, token: Any) -> Any:
        return context * (self.vocab + 1) + token + 1

    @staticmethod
    def random(generator: torch.Generator, max_nodes: int = 4, max_vocab: int = 4) -> Case:
        def pick(n: int) -> int:
            return int(torch.randint(n, (), generator=generator))

        vocab = 2 + pick(max_vocab - 1)
        scheme = SCHEMES[pick(4)]
        known = vocab if pick(3) or vocab < 3 else vocab - 1
        width = known if scheme != "iid" else 3
        nodes = pick(max_nodes + (4 if scheme == "top" else 1))
        paths: list[tuple[int, ...]] = []
        chain_only = pick(3) == 0
        for _ in range(nodes):
            above = ((), *paths)[-1 if chain_only else pick(len(paths) + 1)]
            rank = sum(len(p) == len(above) + 1 and p[:-1] == above for p in paths)
            if rank < width and len(above) < 4:
                paths.append((*above, rank))
        shape = TreeShape.of(paths)
        contexts = (vocab + 1) ** (shape.depth + 1)
        sharp = (0.5, 2.0, 6.0)[pick(3)]

        def logits(width: int) -> Tensor:
            return torch.randn(contexts, width, dtype=torch.float64, generator=generator)

        target = logits(vocab) * sharp
        draft = logits(known) * (0.5, 2.0)[pick(2)]
        kind = pick(6)
        if kind == 0:  # p = q
            target = logits(vocab)
            draft = target[:, -known:].clone()
        if kind == 1:  # mass on few tokens, often none shared
            lost = torch.rand(target.shape, generator=generator) < 0.5
            target = target.masked_fill(lost, -torch.inf)
            target[:, 0] = torch.where(target.isneginf().all(1), 0.0, target[:, 0])
        if kind == 2:  # exact ties
            target = target.round()
        ids = None if known == vocab else torch.arange(vocab - known, vocab)
        sampling = (
            Sampling(1.0),
            Sampling(0.7),
            Sampling(1.0, top_k=2),
            Sampling(1.0, top_p=0.8),
            Sampling(1.3, top_k=min(3, vocab), top_p=0.9),
            Sampling(0.0),
            Sampling(1.0, min_p=0.2),
        )[pick(7)]
        size = None
        if not pick(3) and len(shape):
            size = int(shape.size_at(torch.tensor([pick(shape.depth + 1)])))
        return Case(vocab, shape, scheme, sampling, target, draft, ids, size)

    def propose(self, rng: Branches, rows: int) -> tuple[DraftTree, Tensor]:
        """Return the tree of every row and the context [B, N + 1] of every slot."""
        size = None if self.size is None else torch.full((rows,), self.size)
        begin = torch.zeros(rows, dtype=torch.int64)
        distributions = self.draft.softmax(-1)
        drafted = Drafted(self.shape, self.scheme, distributions, self.child, self.draft_vocab)
        return drafted.tree(begin, size, rng)

    def contexts(self, tree: DraftTree) -> Tensor:
        """Return the context [B, N + 1] of every slot of `tree`, read from its tokens and
        parents."""
        rows, n = tree.tokens.shape
        context = torch.zeros(rows, n + 1, dtype=torch.int64)
        for i in range(n):
            above = context.gather(1, tree.parents[:, i, None] + 1)[:, 0]
            context[:, i + 1] = self.child(above, tree.tokens[:, i])
        return context


def naive_distribution(logits: Tensor, s: Sampling) -> Tensor:
    """Return the documented distribution written with sets and sums, one row at a time."""
    values = logits.tolist()
    if s.temperature == 0:
        best = max(range(len(values)), key=lambda i: (values[i], -i))
        return torch.nn.functional.one_hot(torch.tensor(best), len(values)).double()
    values = [v / s.temperature for v in values]
    keep = [v > -float("inf") for v in values]
    if s.top_k:
        edge = sorted(values, reverse=True)[s.top_k - 1]
        keep = [k and v >= edge for k, v in zip(keep, values, strict=True)]
    kept = [v if k else -float("inf") for k, v in zip(keep, values, strict=True)]
    distribution = torch.tensor(kept, dtype=torch.float64).softmax(0)
    if s.top_p < 1:
        total, edge = 0.0, 0.0
        for p in sorted(distribution.tolist(), reverse=True):
            if total >= s.top_p:
                break
            total, edge = total + p, p
        distribution = torch.where(distribution >= edge, distribution, 0.0)
    if s.min_p:
        distribution = torch.where(
            distribution >= s.min_p * distribution.max() * (1 - 1e-15), distribution, 0.0
        )
    return distribution / distribution.sum()


Verifier = Callable[[DraftTree, Distribution, Branches], Verdict]
Mangle = Callable[[DraftTree], DraftTree]


@dataclass
class Outcome:
    """error: of any sequence's probability. accepted: draft tokens to be expected."""

    error: float
    accepted: float
    leaves: int


def enumerate_case(case: Case, verifier: Verifier, mangle: Mangle | None = None) -> Outcome:
    """Exact distribution of the emitted tokens, continued by the target to full length,
    against the target's own distribution.

    mangle: what a wrong drafter does to its tree after drawing it.
    """
    length = case.shape.depth + 1
    distribution: dict[tuple[int, ...], float] = {}
    accepted, leaves = 0.0, 0
    scripts: list[Script] = [{}]
    while scripts:
        rng = Branches(scripts)
        rows = len(scripts)
        tree, context = case.propose(rng, rows)
        validate(tree, case.vocab)
        if mangle is not None:
            tree = mangle(tree)
            context = case.contexts(tree)
        verdict = verifier(tree, Distribution(case.sampling, case.target[context], tree), rng)
        scripts = rng.new
        leaves += rows
        for b in range(rows):
            nodes = verdict.path[b][: verdict.length[b]]
            key = (*tree.tokens[b, nodes].tolist(), int(verdict.bonus[b]))
            distribution[key] = distribution.get(key, 0.0) + rng.weight[b]
            accepted += rng.weight[b] * len(nodes)
    return Outcome(_difference(case, distribution, length), accepted, leaves)


def _difference(case: Case, distribution: dict[tuple[int, ...], float], length: int) -> float:
    @functools.cache
    def behind(context: int) -> list[float]:
        found: list[float] = naive_distribution(case.target[context], case.sampling).tolist()
        return found

    def spread(table: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        full: dict[tuple[int, ...], float] = {}
        todo = list(table.items())
        while todo:
            prefix, mass = todo.pop()
            if len(prefix) == length:
                full[prefix] = full.get(prefix, 0.0) + mass
                continue
            after = behind(functools.reduce(case.child, prefix, 0))
            todo += [((*prefix, x), mass * p) for x, p in enumerate(after) if p]
        return full

    ours, theirs = spread(distribution), spread({(): 1.0})
    return largest_difference(ours, theirs)


def largest_difference(
    ours: dict[tuple[int, ...], float], theirs: dict[tuple[int, ...], float]
) -> float:
    """Return the largest difference of two distributions over sequences; infinite where
    either holds NaN, which `max` passes over."""
    off = [abs(ours.get(k, 0.0) - theirs.get(k, 0.0)) for k in ours.keys() | theirs.keys()]
    return math.inf if any(map(math.isnan, off)) else max(off)
