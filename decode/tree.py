"""Draft trees: which tokens a drafter proposes, who hangs below whom, and what each token was
drawn from.

Shape letters: B rows (sequences), N nodes per row, C most children of one node, D deepest
level, P proposal distributions per row, Vd draft vocabulary. Slot 0 is the last committed token,
slot i + 1 is node i.

A chain is a tree of width one; the empty tree (N = 0) is autoregressive decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import devices, tree_rules
from outrider.decode.layout import TreeLayout

__all__ = ["DraftTree", "Proposal", "TreeLayout", "TreeShape"]


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

    def validate(self, vocab_size: int, max_nodes: int | None = None) -> None:
        """Raise ValueError naming row and node when the tree is malformed, UserError when the
        drafter's distribution is not finite. One host round trip where all is well."""
        tree_rules.validate(self, vocab_size, max_nodes)

    def doubtful(self, vocab_size: int) -> Tensor:
        """[B] bool, rows that `validate` would refuse, without asking the device."""
        return tree_rules.doubtful(self, vocab_size)

    def check_form(self, max_nodes: int | None = None) -> None:
        """Raise ValueError for wrong shapes or dtypes, or for more than `max_nodes` nodes."""
        tree_rules.check_form(self, max_nodes)


@dataclass(frozen=True)
class TreeShape:
    """A static tree as paths of ranks: (0,) is the best child of the last token, (0, 2) the
    third best below it.

    Nodes stand level by level, so cutting a row at depth d keeps a prefix of them.
    """

    paths: tuple[tuple[int, ...], ...]

    @staticmethod
    @functools.cache
    def chain(n: int) -> TreeShape:
        return TreeShape(tuple((0,) * (i + 1) for i in range(n)))

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> TreeShape:
        """Sort and check: every prefix present, ranks of siblings 0, 1, 2 ... Raises UserError
        otherwise.
        """
        known = sorted({tuple(int(r) for r in p) for p in paths}, key=lambda p: (len(p), p))
        have = set(known)
        for path in known:
            if not path or min(path) < 0:
                raise UserError(
                    f"tree: path {list(path)} is not a list of ranks >= 0; give paths "
                    "such as [0] or [0, 1]"
                )
            if len(path) > 1 and path[:-1] not in have:
                raise UserError(f"tree: path {list(path)} has no parent {list(path[:-1])}; add it")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in have:
                raise UserError(
                    f"tree: path {list(path)} skips rank {path[-1] - 1} of its siblings; add it"
                )
        return TreeShape(tuple(known))

    def __len__(self) -> int:
        return len(self.paths)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.paths)

    @functools.cached_property
    def depth(self) -> int:
        return max((len(p) for p in self.paths), default=0)

    def cut(self, depth: int) -> TreeShape:
        """The nodes no deeper than `depth` levels."""
        return self if depth >= self.depth else _cut(self, depth)

    def level(self, d: int) -> range:
        """Node numbers of level d (0 = children of the last committed token)."""
        start = sum(len(p) <= d for p in self.paths)
        return range(start, start + sum(len(p) == d + 1 for p in self.paths))

    def size_at(self, budget: Tensor) -> Tensor:
        """Number of nodes no deeper than `budget` [B] levels: [B] int64."""
        return _counts(self, budget.device)[budget.clamp(0, self.depth)]

    def parents(self, device: torch.device) -> Tensor:
        """[1, N] int64."""
        return _static(self, torch.device(device))[0]

    def layout(self, device: torch.device) -> TreeLayout:
        return _static(self, torch.device(device))[1]


@functools.lru_cache(maxsize=256)
def _cut(shape: TreeShape, depth: int) -> TreeShape:
    return TreeShape(tuple(p for p in shape.paths if len(p) <= depth))


@functools.lru_cache(maxsize=256)
def _counts(shape: TreeShape, device: torch.device) -> Tensor:
    """[depth + 1] int64: nodes no deeper than 0, 1 .. levels."""
    counts = [sum(len(p) <= d for p in shape.paths) for d in range(shape.depth + 1)]
    return torch.tensor(counts, device=device)


@functools.lru_cache(maxsize=256)
def _static(shape: TreeShape, device: torch.device) -> tuple[Tensor, TreeLayout]:
    index = {path: i for i, path in enumerate(shape.paths)}
    parents = torch.tensor(
        [[index.get(p[:-1], -1) for p in shape.paths]], dtype=torch.int64
    ).reshape(1, len(index))
    layout = TreeLayout.of(parents).to(device)
    return layout.parents, layout
