"""Draft trees: which tokens a drafter proposes, who hangs below whom, and what each token was
drawn from.

Shape letters: B rows (sequences), N nodes per row, C most children of one node, D deepest
level, P proposal distributions per row, Vd draft vocabulary. Slot 0 is the last committed token,
slot i + 1 is node i.

A chain is a tree of width one; the empty tree (N = 0) is autoregressive decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import devices
from outrider.decode.layout import TreeLayout, TreeShape

__all__ = ["DraftTree", "Proposal", "TreeLayout", "TreeShape"]

NON_FINITE = "check the head's weights, and whether its logits overflow in this dtype"
_SCORE = f"its score is NaN or infinite; {NON_FINITE}"
_DISTRIBUTION = f"the distribution that it was drawn from holds NaN or infinity; {NON_FINITE}"
# Where it is, [B, N] bool, the values that are wrong there, what is said of them.
Problem = tuple[Tensor, Tensor, str]


@dataclass(frozen=True)
class Proposal:
    """The distributions that sampled nodes were drawn from.

    probs: [B, P, Vd] float32 or float64, each row sums to one.
    row: [B, N] int64, the row of probs of a node's siblings (siblings share it; unused for
        deterministic nodes).
    vocab: [Vd] int64 ascending target ids of the draft vocabulary, None for the whole
        vocabulary.
    replacement: False: a sibling was drawn from the distribution with all earlier siblings removed
        (deterministic ones too), renormalised. True: siblings are independent draws.
    """

    probs: Tensor
    row: Tensor
    vocab: Tensor | None = None
    replacement: bool = False

    def read(self, probs: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
        """`probs` [R, Vd] read at target `ids` [R, S]; None: at all ids, [R, V]. Outside the
        draft vocabulary: 0.
        """
        if self.vocab is None:
            return probs if ids is None else probs.gather(1, ids)
        if ids is None:
            return probs.new_zeros(probs.shape[0], vocab_size).index_copy_(1, self.vocab, probs)
        place, inside = self.place(ids)
        return torch.where(inside, probs.gather(1, place), probs.new_zeros(()))

    def place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where target `ids` stand in the draft vocabulary (clamped), and whether they are in
        it.
        """
        if self.vocab is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self.vocab, ids.contiguous()).clamp_(max=self.vocab.numel() - 1)
        return place, self.vocab[place] == ids


@dataclass(frozen=True)
class DraftTree:
    """One draft per row. Rows may differ in size: nodes at or beyond size[b] are padding and
    never read.

    tokens: [B, N] int64. parents: [B, N] int64, parents[b, i] < i, -1 = child of the last
        committed token.
    size: [B] int64. sampled: [B, N] bool, or None when every node is deterministic (its
        proposal is a point mass).
    proposal: what the sampled nodes were drawn from. Siblings stand in draw order: only a
        wholly deterministic tree may be re-ranked, since reordering sampled siblings by value
        biases the output (DSpark, appendix A).
    layout: given by static shapes, derived from the parents otherwise.
    score: [B, N] float, the drafter's own order of a dynamic tree's nodes (cumulative
        log-probability): for tuning. A draft whose score is not finite is refused.
    drafters: [B, N] int64, who of a union proposed a node (decode.union): bit k for its k-th
        drafter. None where there is one alone.
    """

    tokens: Tensor
    parents: Tensor
    size: Tensor
    sampled: Tensor | None = None
    proposal: Proposal | None = None
    static_layout: TreeLayout | None = dataclass_field(default=None, repr=False)
    score: Tensor | None = dataclass_field(default=None, repr=False)
    drafters: Tensor | None = dataclass_field(default=None, repr=False)

    @functools.cached_property
    def layout(self) -> TreeLayout:
        return self.static_layout or TreeLayout.of(self.parents)

    @property
    def width(self) -> int:
        """N, the padded number of nodes."""
        return self.tokens.shape[1]

    def mask(self) -> Tensor:
        """[B or 1, N + 1, N + 1] bool: slot j is slot i or an ancestor of it."""
        return self.layout.mask

    def positions(self) -> Tensor:
        """[B or 1, N + 1] int64: distance of every slot from the last committed token."""
        return self.layout.positions

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu", drawn: bool = False) -> DraftTree:
        """No draft at all for `rows` rows. drawn: of a drafter that draws. What a union adds to
        it is then verified as beside rows of which something was drawn: a row's random numbers,
        and so its tokens, do not depend on its neighbours."""
        none = torch.empty(rows, 0, dtype=torch.int64, device=device)
        sampled = proposal = None
        if drawn:
            probs = torch.ones(rows, 1, 1, device=device)
            sampled, proposal = none.bool(), Proposal(probs, none, none.new_zeros(1))
        return DraftTree(
            none,
            none,
            torch.zeros(rows, dtype=torch.int64, device=device),
            sampled,
            proposal,
            static_layout=TreeShape.chain(0).layout(torch.device(device)),
        )

    @staticmethod
    def chain(
        tokens: Tensor,
        size: Tensor | None = None,
        sampled: Tensor | None = None,
        proposal: Proposal | None = None,
    ) -> DraftTree:
        """A chain of `tokens` [B, N]; size [B] defaults to N."""
        return DraftTree.static(TreeShape.chain(tokens.shape[1]), tokens, size, sampled, proposal)

    @staticmethod
    def static(
        shape: TreeShape,
        tokens: Tensor,
        size: Tensor | None = None,
        sampled: Tensor | None = None,
        proposal: Proposal | None = None,
    ) -> DraftTree:
        """`tokens` [B, N] hung on a shape all rows share; nodes stand level by level, so a row
        is cut by its size.
        """
        rows, n = tokens.shape
        if size is None:
            size = torch.full((rows,), n, dtype=torch.int64, device=tokens.device)
        return DraftTree(
            tokens,
            shape.parents(tokens.device).expand(rows, n),
            devices.send(size, tokens.device),
            sampled,
            proposal,
            static_layout=shape.layout(tokens.device),
        )

    def check_form(self, max_nodes: int | None = None) -> None:
        """Raise ValueError for wrong shapes or dtypes, or for more than `max_nodes` nodes."""
        shapes = self.tokens.shape, self.parents.shape, self.size.shape
        if not (shapes[0] == shapes[1] and shapes[2] == shapes[0][:1]):
            words = "tokens {}, parents {}, size {}".format(*map(tuple, shapes))
            raise ValueError(f"draft tree: shapes differ: {words}")
        for name in ("tokens", "parents", "size"):
            if (dtype := getattr(self, name).dtype) != torch.int64:
                raise ValueError(f"draft tree: {name} must be int64, not {dtype}")
        if max_nodes is not None and self.width > max_nodes:
            raise ValueError(f"draft tree: {self.width} nodes exceed the budget of {max_nodes}")

    def validate(self, vocab_size: int, max_nodes: int | None = None) -> None:
        """Raise ValueError naming row and node when the tree is malformed, UserError when the
        drafter's distribution is not finite. One host round trip where all is well."""
        self.check_form(max_nodes)
        if not bool(self.doubtful(vocab_size).any()):
            return
        # A distribution that is not finite makes twins as well, and is what the user can mend.
        problems = [*_non_finite(self), *_malformed(self, vocab_size)]
        bad, values, why = next(problem for problem in problems if bool(problem[0].any()))
        row, node = bad.nonzero()[0].tolist()
        place = f"row {row}, node {node}:"
        if why in (_SCORE, _DISTRIBUTION):
            raise UserError(f"drafter: {place} {why}; nothing was committed")
        why = why.format(value=values[row, node].item())
        raise ValueError(f"draft tree: {place} {why}")

    def doubtful(self, vocab_size: int) -> Tensor:
        """Return [B] bool, rows that `validate` would refuse, without asking the device."""
        problems = [*_non_finite(self), *_malformed(self, vocab_size)]
        return torch.stack([bad.any(1) for bad, _, _ in problems]).any(0)

    def non_finite(self) -> Tensor:
        """Return [B, N] bool, nodes whose score, or the distribution that they were drawn from, is
        not finite, without asking the device."""
        none = torch.zeros_like(self.tokens, dtype=torch.bool)
        return functools.reduce(torch.logical_or, (bad for bad, _, _ in _non_finite(self)), none)

    def cut(self, nodes: Tensor) -> DraftTree:
        """Return the tree of every row up to the first of `nodes` [B, N] bool; rows without one
        keep every node and number.

        Nodes before that one are judged although those after it are not: whether a node is judged
        may depend on tokens that were drawn before it alone. A draft dropped whole for what was
        found deep in it would be dropped for its own tokens, and what is drawn in their place is
        biased."""
        if not self.width:
            return self
        node = torch.arange(self.width, device=nodes.device)
        first = torch.where(nodes, node, self.width).amin(1)
        return replace(self, size=torch.minimum(self.size, first))


def _used(tree: DraftTree) -> Tensor:
    return torch.arange(tree.width, device=tree.size.device) < tree.size[:, None]


def _drawn_from(proposal: Proposal, values: Tensor) -> Tensor:
    """`values` [B, P] of the distributions, at the nodes [B, N] that were drawn from them. A
    deterministic node's row may be anything."""
    row = proposal.row.clamp(0, values.shape[1] - 1)
    return values.gather(1, row)


def _non_finite(tree: DraftTree) -> Iterator[Problem]:
    """What a drafter whose numbers overflow makes of a tree."""
    if tree.score is not None and tree.width:
        yield _used(tree) & ~tree.score.isfinite(), tree.tokens, _SCORE
    if tree.sampled is not None and tree.proposal is not None and tree.width:
        total = tree.proposal.probs.sum(-1, dtype=torch.float64)
        if total.shape[1]:
            bad = _drawn_from(tree.proposal, ~total.isfinite())
            yield _used(tree) & tree.sampled & bad, tree.proposal.row, _DISTRIBUTION


def _malformed(tree: DraftTree, vocab_size: int) -> Iterator[Problem]:
    """What else can be wrong with the values."""
    n, size, tokens, parents = tree.width, tree.size[:, None], tree.tokens, tree.parents
    yield (size < 0) | (size > n), size, f"size {{value}} outside 0..{n}"
    if n == 0:
        return
    node, used = torch.arange(n, device=tokens.device), _used(tree)
    outside = f"token {{value}} outside the vocabulary 0..{vocab_size - 1}"
    yield used & ((tokens < 0) | (tokens >= vocab_size)), tokens, outside
    if tree.static_layout is None:
        wrong = (parents >= node) | (parents < -1)
        yield wrong, parents, "parent {value} must be -1 or an earlier node"
    twin = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    twin = twin & (node[:, None] > node) & used[:, :, None] & used[:, None]
    drawn = torch.zeros_like(used) if tree.sampled is None else used & tree.sampled
    proposal = tree.proposal
    if proposal is None:
        yield drawn, tokens, "token {value} is sampled, without the proposal it was drawn from"
    elif proposal.replacement:
        twin = twin & ~drawn[:, :, None] & ~drawn[:, None]
    yield twin.any(-1), tokens, "token {value} stands twice among its siblings"
    if proposal is None or tree.sampled is None:
        return
    probs, row, last = proposal.probs, proposal.row, proposal.probs.shape[1] - 1
    if last < 0:
        yield drawn, row, "distribution row {value} of a proposal without distributions"
        return
    missing = f"distribution row {{value}} outside 0..{last}"
    yield drawn & ((row < 0) | (row > last)), row, missing
    total = probs.sum(-1, dtype=torch.float64)
    wrong = ~((total - 1).abs() <= 1e-4) | ~(probs.amin(-1) >= 0)
    short = "distribution row {value} does not sum to one, or is negative"
    yield drawn & _drawn_from(proposal, wrong), row, short
    ids = tokens.clamp(0, (probs.shape[2] if proposal.vocab is None else vocab_size) - 1)
    place, known = proposal.place(ids)
    batch = torch.arange(len(row), device=row.device)[:, None]
    mass = probs[batch, row.clamp(0, last), place]
    none = "token {value} has no mass in the distribution it was drawn from"
    yield drawn & ~((mass > 0) & known & (tokens == ids)), tokens, none
