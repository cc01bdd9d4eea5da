"""What a draft tree may not hold: the rules that every drafter's trees are held against before
the target reads them.

Shape letters: as in decode/tree.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.conf.errors import UserError

ANY_VOCABULARY = 1 << 62
WILD = "check the head's weights, and whether its logits overflow in this dtype"
_WILD_SCORE = f"its score is NaN or infinite; {WILD}"
_WILD_DISTRIBUTION = f"the distribution that it was drawn from holds NaN or infinity; {WILD}"


class Tree(Protocol):
    """What is read of a tree (decode.tree.DraftTree)."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def parents(self) -> Tensor: ...
    @property
    def size(self) -> Tensor: ...
    @property
    def sampled(self) -> Tensor | None: ...
    @property
    def proposal(self) -> Any: ...
    @property
    def static_layout(self) -> Any: ...
    @property
    def score(self) -> Tensor | None: ...
    @property
    def width(self) -> int: ...


def validate(tree: Tree, vocab_size: int, max_nodes: int | None = None) -> None:
    """Raise ValueError naming row and node when the tree is malformed, UserError when the
    drafter's distribution is not finite. One host round trip where all is well."""
    check_form(tree, max_nodes)
    problems = list(_problems(tree, vocab_size))
    if not bool(_doubtful(problems).any()):
        return
    # A distribution that is not finite makes twins as well, and is what the user can mend.
    problems.sort(key=lambda problem: problem[2] not in (_WILD_SCORE, _WILD_DISTRIBUTION))
    bad, values, why = next(problem for problem in problems if bool(problem[0].any()))
    row, node = bad.nonzero()[0].tolist()
    place, value = f"row {row}, node {node}:", values[row, node].item()
    if why in (_WILD_SCORE, _WILD_DISTRIBUTION):
        raise UserError(f"drafter: {place} {why}; nothing was committed")
    raise ValueError(f"draft tree: {place} {why.format(value=value)}")


def doubtful(tree: Tree, vocab_size: int) -> Tensor:
    """[B] bool, rows that `validate` would refuse, without asking the device."""
    return _doubtful(list(_problems(tree, vocab_size)))


def wild(tree: Tree) -> Tensor:
    """[B, N] bool, nodes whose score, or the distribution that they were drawn from, is not
    finite, without asking the device."""
    problems = _problems(tree, ANY_VOCABULARY)
    found = [bad for bad, _, why in problems if why in (_WILD_SCORE, _WILD_DISTRIBUTION)]
    return torch.stack([torch.zeros_like(tree.tokens, dtype=torch.bool), *found]).any(0)


def cut(tree: Any, nodes: Tensor) -> Any:
    """The tree of every row up to the first of `nodes` [B, N] bool; rows without one keep every
    node and number.

    Nodes before that one are judged although those after it are not: whether a node is judged may
    depend on tokens that were drawn before it alone. A draft dropped whole for what was found deep
    in it would be dropped for its own tokens, and what is drawn in their place is biased."""
    first = torch.where(nodes, torch.arange(tree.width, device=nodes.device), tree.width)
    return replace(tree, size=torch.minimum(tree.size, first.amin(1)) if tree.width else tree.size)


def check_form(tree: Tree, max_nodes: int | None = None) -> None:
    """Raise ValueError for wrong shapes or dtypes, or for more than `max_nodes` nodes."""
    shapes = tree.tokens.shape, tree.parents.shape, tree.size.shape
    if not (shapes[0] == shapes[1] and shapes[2] == shapes[0][:1]):
        raise ValueError(
            "draft tree: shapes differ: tokens {}, parents {}, size {}".format(*map(tuple, shapes))
        )
    for name in ("tokens", "parents", "size"):
        if getattr(tree, name).dtype != torch.int64:
            raise ValueError(f"draft tree: {name} must be int64, not {getattr(tree, name).dtype}")
    if max_nodes is not None and tree.width > max_nodes:
        raise ValueError(f"draft tree: {tree.width} nodes exceed the budget of {max_nodes}")


def _problems(tree: Tree, vocab_size: int) -> Iterator[tuple[Tensor, Tensor, str]]:
    """All that can be wrong with the values: (where it is, [B, N] bool, the values that are
    wrong there, what is said of them)."""
    n, size = tree.width, tree.size[:, None]
    yield (size < 0) | (size > n), size, f"size {{value}} outside 0..{n}"
    if n == 0:
        return
    tokens, parents = tree.tokens, tree.parents
    node = torch.arange(n, device=tokens.device)
    used = node < size
    outside = f"token {{value}} outside the vocabulary 0..{vocab_size - 1}"
    yield used & ((tokens < 0) | (tokens >= vocab_size)), tokens, outside
    if tree.score is not None:
        yield used & ~tree.score.isfinite(), tokens, _WILD_SCORE
    if tree.static_layout is None:
        wrong = (parents >= node) | (parents < -1)
        yield wrong, parents, "parent {value} must be -1 or an earlier node"
    twin = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    twin = twin & (node[:, None] > node) & used[:, :, None] & used[:, None]
    drawn = torch.zeros_like(used) if tree.sampled is None else used & tree.sampled
    proposal = tree.proposal
    if proposal is None:
        alone = "is sampled, without the proposal it was drawn from"
        yield drawn, tokens, f"token {{value}} {alone}"
    if proposal is not None and proposal.replacement:
        twin = twin & ~drawn[:, :, None] & ~drawn[:, None]
    yield twin.any(-1), tokens, "token {value} stands twice among its siblings"
    if proposal is None or tree.sampled is None:
        return
    probs, row = proposal.probs, proposal.row
    places = probs.shape[1] - 1
    if places < 0:
        yield drawn, row, "distribution row {value} of a proposal without distributions"
        return
    yield (
        drawn & ((row < 0) | (row > places)),
        row,
        f"distribution row {{value}} outside 0..{places}",
    )
    # A deterministic node's row may be anything, and what lies outside is reported above.
    batch, own = torch.arange(len(row), device=probs.device)[:, None], row.clamp(0, places)
    total = probs.sum(-1, dtype=torch.float64)
    yield drawn & ~total.isfinite()[batch, own], row, _WILD_DISTRIBUTION
    bad_probs = ~((total - 1).abs() <= 1e-4) | ~(probs.amin(-1) >= 0)
    short = "distribution row {value} does not sum to one, or is negative"
    yield drawn & bad_probs[batch, own], row, short
    ids = tokens.clamp(0, (probs.shape[2] if proposal.vocab is None else vocab_size) - 1)
    rows = probs[batch.expand_as(own).reshape(-1), own.reshape(-1)]
    mass = proposal.read(rows, ids.reshape(-1, 1), 0).reshape(tokens.shape)
    none = "token {value} has no mass in the distribution it was drawn from"
    yield drawn & ~((mass > 0) & (tokens == ids)), tokens, none


def _doubtful(problems: list[tuple[Tensor, Tensor, str]]) -> Tensor:
    return torch.stack([bad.any(1) for bad, _, _ in problems]).any(0)
