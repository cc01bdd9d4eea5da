"""Drafters of parallel heads: a chain (sampled at T > 0) or a static tree, in one shot or
level by level.

In one shot, when no head looks at drafted tokens (Medusa): all levels at once. Level by level,
when head d reads the tokens of a node's own path (Hydra heads, Medusa's Markov term): the
children of a node come from its own logits. Where T > 0 the candidates of a tree are drawn,
siblings without replacement, or they are the top ranks at any temperature (`tree_draw=fixed`),
each verified as a point mass.

Shape letters: B live rows, D width, K heads, L blocks, Vd draft vocabulary, N tree nodes, P
parents of one level.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.grow import Form, siblings
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, Proposal, TreeShape


class Guesses(Protocol):
    """What a drafter reads of a head (heads/parallel/base.py). width: D. proj: [K, Vd, D],
    None: the target's LM head.
    """

    kind: ClassVar[str]
    taps: tuple[int, ...]
    width: int
    proj: Any

    def ids(self) -> Tensor | None: ...
    def projection(self, target: Target) -> Tensor: ...


class Blocks(Guesses, Protocol):
    """Medusa's own (heads/parallel/medusa.py): block_weight [K, L, D, D], block_bias [K, L,
    D], the Markov term or None.
    """

    block_weight: Any
    block_bias: Any
    markov_in: Any
    markov_out: Any


class LastFeature:
    """What both keep of a row: the feature that predicted its last committed token (`feats`
    [B, D]) and that token (`last` [B]). See decode.drafters.Drafter."""

    def __init__(self, head: Guesses, target: Target, form: Form) -> None:
        assert form.static is not None, "K heads have no dynamic trees"
        shape = form.static
        self.name, self.kind = f"{head.kind}@{form.shape}", head.kind
        self.form, self.shape, self.taps = form, form.shape, head.taps
        self.max_nodes, self.max_depth = form.nodes, form.depth
        self.vocab, self.device = head.ids(), target.device
        self.cuts = {
            d: TreeShape(tuple(p for p in shape.paths if len(p) <= d))
            for d in range(shape.depth + 1)
        }
        proj = head.projection(target).detach().to(target.dtype, copy=head.proj is not None)
        self.proj = proj[: shape.depth] if proj.dim() == 3 else proj
        self.feats = torch.zeros(0, head.width, dtype=target.dtype, device=target.device)
        self.last = torch.zeros(0, dtype=torch.int64, device=target.device)

    def reset(self, rows: int, max_len: int) -> None:
        """Forget every row."""
        self.feats, self.last = self.feats[:0], self.last[:0]

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        """Append a row for each prompt; its feature comes with the first observe."""
        self.feats = torch.cat(
            [self.feats, self.feats.new_zeros(len(prompts), self.feats.shape[1])]
        )
        self.last = torch.cat([self.last, self.last.new_zeros(len(prompts))])

    def observe(
        self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice = slice(None)
    ) -> None:
        """Keep the feature that predicted the last committed token of each row; tokens [B,
        n_max], feats [B, n_max, 1, D], n [B] (a row with n = 0 keeps what it has)."""
        if feats is None:
            raise ValueError(f"{self.kind} drafts from the target's features; none were given")
        row, at = torch.arange(n.shape[0], device=n.device), (n - 1).clamp(min=0)
        self.feats[rows] = torch.where(
            n[:, None] > 0, feats[row, at, 0].to(self.feats.dtype), self.feats[rows]
        )
        self.last[rows] = torch.where(n > 0, tokens[row, at], self.last[rows])

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order."""
        self.feats, self.last = self.feats[rows], self.last[rows]

    def tokens(self, places: Tensor) -> Tensor:
        """Target ids of places in the draft vocabulary."""
        return places if self.vocab is None else self.vocab[places]


class MedusaDrafter(LastFeature):
    """All levels at once: the heads read the last feature alone."""

    def __init__(self, head: Blocks, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        shape, depth = self.cuts[form.depth], form.depth
        self.weight = head.block_weight.detach()[:depth].to(target.dtype, copy=True).transpose(2, 3)
        self.bias = head.block_bias.detach()[:depth, :, None].to(target.dtype, copy=True)
        rank = [[p[-1] for p in shape.paths], [len(p) - 1 for p in shape.paths]]
        self.rank, self.level = torch.tensor(rank, device=target.device)
        self.width = 1 + max((p[-1] for p in shape.paths), default=0)

    def logits(self, depth: int) -> Tensor:
        """[depth, B, Vd]: head i's guess at the token i + 1 after the last committed one."""
        x = self.feats.expand(depth, *self.feats.shape)
        for layer in range(self.weight.shape[1]):
            x = x + F.silu(torch.baddbmm(self.bias[:depth, layer], x, self.weight[:depth, layer]))
        return (
            x @ self.proj.T
            if self.proj.dim() == 2
            else torch.bmm(x, self.proj[:depth].transpose(1, 2))
        )

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]."""
        rows, device = self.feats.shape[0], self.feats.device
        depth = min(self.max_depth, int(budget.max())) if rows else 0
        if depth <= 0:
            return DraftTree.empty(rows, device)
        shape = self.cuts[depth]
        logits = self.logits(depth)
        if self.form.drawn and self.shape == "tree" and not sampling.greedy:
            return self._sampled_tree(logits, shape, shape.size_at(budget), sampling, rng)
        if self.shape == "chain" and not sampling.greedy:
            return self._sampled(logits, shape.size_at(budget), sampling, rng)
        top = (
            logits.argmax(-1, keepdim=True)
            if self.width == 1
            else logits.topk(self.width, -1).indices
        )
        tokens = self.tokens(top)[self.level[: len(shape)], :, self.rank[: len(shape)]].T
        return DraftTree.static(shape, tokens.contiguous(), shape.size_at(budget))

    def _sampled(self, logits: Tensor, size: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        depth, rows, width = logits.shape
        law = sampling.draft_law(logits.transpose(0, 1).reshape(rows * depth, width))
        node = torch.arange(depth, device=law.device)
        batch = torch.arange(rows, device=law.device)
        drawn = rng.draft(law, batch.repeat_interleave(depth), node.repeat(rows)).view(rows, depth)
        tokens = self.tokens(drawn)
        proposal = Proposal(law.view(rows, depth, width), node.expand(rows, depth), self.vocab)
        return DraftTree.chain(tokens, size, torch.ones_like(tokens, dtype=torch.bool), proposal)

    def _sampled_tree(
        self, logits: Tensor, shape: TreeShape, size: Tensor, sampling: Sampling, rng: Rng
    ) -> DraftTree:
        """Siblings drawn one after the other from their level's law, without replacement:
        which nodes exist does not depend on what was drawn. Where a truncated law has run out
        of tokens, the next best one stands in as a deterministic candidate."""
        depth, rows, width = logits.shape
        law = sampling.draft_law(logits.flatten(0, 1)).view(depth, rows, width)
        tokens = torch.zeros(rows, len(shape), dtype=torch.int64, device=logits.device)
        drawn = torch.ones(rows, len(shape), dtype=torch.bool, device=logits.device)
        for level in range(depth):
            kids: dict[tuple[int, ...], list[int]] = {}  # by parent
            for i in shape.level(level):
                kids.setdefault(shape.paths[i][:-1], []).append(i)
            one, z = (x[level][:, None].expand(rows, len(kids), width) for x in (law, logits))
            nodes, place, fresh = siblings(one, z, list(kids.values()), rng)
            tokens[:, nodes], drawn[:, nodes] = self.tokens(place), fresh
        level_of = self.level[: len(shape)].expand(rows, -1)
        return DraftTree.static(
            shape, tokens, size, drawn, Proposal(law.transpose(0, 1), level_of, self.vocab)
        )


class LevelDrafter(LastFeature):
    """Level by level. A subclass gives `open` (what a draft of some depth computes once) and
    `level`.
    """

    def __init__(self, head: Guesses, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        shape = self.cuts[form.depth]
        slot = {path: i + 1 for i, path in enumerate(shape.paths)} | {(): 0}
        self.levels: list[tuple[range, int, Tensor, Tensor, Tensor, list[list[int]]]] = []
        laws: list[int] = []  # by node: number of its parent among all parents
        for d in range(shape.depth):
            nodes = shape.level(d)
            parents = sorted({shape.paths[i][:-1] for i in nodes}, key=lambda p: slot[p])
            paths = [[slot[p[:j]] for j in range(d + 1)] for p in parents]
            place = [
                [parents.index(shape.paths[i][:-1]) for i in nodes],
                [shape.paths[i][-1] for i in nodes],
            ]
            below, rank = torch.tensor(place, device=target.device)
            first = max(laws, default=-1) + 1
            laws += [first + j for j in place[0]]
            kids = [[i for i in nodes if shape.paths[i][:-1] == p] for p in parents]
            # nodes, children looked at, slots from the last token to each parent [P, d + 1],
            # parent and rank of a node, nodes of a parent
            self.levels.append(
                (
                    nodes,
                    1 + max(place[1]),
                    torch.tensor(paths, device=target.device),
                    below,
                    rank,
                    kids,
                )
            )
        self.law_row = torch.tensor(laws, dtype=torch.int64, device=target.device)

    def open(self, depth: int) -> Any:
        """What the levels below `depth` have in common; given to `level`."""
        return None

    def level(self, d: int, path: Tensor, common: Any) -> Tensor:
        """Logits [B, P, Vd] of the children of P parents; path [B, P, d + 1]: the last
        committed token, then drafted ones down to the parent."""
        raise TypeError("a subclass defines it")

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """A draft no deeper than budget [B]."""
        rows = self.feats.shape[0]
        depth = min(self.max_depth, int(budget.max())) if rows else 0
        if depth <= 0:
            return DraftTree.empty(rows, self.device)
        shape, common = self.cuts[depth], self.open(depth)
        sampled = not sampling.greedy and (self.form.drawn or self.shape == "chain")
        tokens = torch.zeros(rows, 1 + len(shape), dtype=torch.int64, device=self.device)
        tokens[:, 0], drafted = self.last, tokens[:, 1:]
        drawn = torch.ones(rows, len(shape), dtype=torch.bool, device=self.device)
        laws: list[Tensor] = []
        for d, (nodes, width, paths, below, rank, kids) in enumerate(self.levels[:depth]):
            logits = self.level(d, tokens[:, paths], common)
            if sampled:
                laws.append(sampling.draft_law(logits.flatten(0, 1)).view(logits.shape))
                order, place, fresh = siblings(laws[-1], logits, kids, rng)
                drafted[:, order], drawn[:, order] = self.tokens(place), fresh
            else:
                top = (
                    logits.argmax(-1, keepdim=True)
                    if width == 1
                    else logits.topk(width, -1).indices
                )
                drafted[:, nodes.start : nodes.stop] = self.tokens(top[:, below, rank])
        size = shape.size_at(budget)
        if not sampled:
            return DraftTree.static(shape, drafted.contiguous(), size)
        proposal = Proposal(
            torch.cat(laws, 1), self.law_row[: len(shape)].expand(rows, -1), self.vocab
        )
        return DraftTree.static(shape, drafted.contiguous(), size, drawn, proposal)


class MarkovDrafter(LevelDrafter):
    """Medusa with a low-rank term of the token before: the heads' own logits are computed
    once, for all levels.
    """

    def __init__(self, head: Blocks, target: Target, form: Form) -> None:
        super().__init__(head, target, form)
        assert head.markov_in is not None and head.markov_out is not None
        self.parallel = MedusaDrafter(head, target, form)
        self.markov_in = head.markov_in.detach().to(target.dtype, copy=True)
        self.markov_out = head.markov_out.detach().to(target.dtype, copy=True)

    def open(self, depth: int) -> Tensor:
        """[depth, B, Vd]."""
        self.parallel.feats = self.feats
        return self.parallel.logits(depth)

    def level(self, d: int, path: Tensor, common: Any) -> Tensor:
        """See LevelDrafter."""
        return common[d][:, None] + F.linear(
            F.embedding(path[..., -1], self.markov_in), self.markov_out
        )
