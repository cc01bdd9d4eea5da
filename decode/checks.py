"""What is refused: requests and prompts that a target has no room for, and draft trees that break
the rules, before anything of them is kept.

Shape letters: as in decode/tree.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.generation import Request
from outrider.decode.scorer import Scorer
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, Proposal

NON_FINITE = "check the head's weights, and whether its logits overflow in this dtype"
_SCORE = f"its score is NaN or infinite; {NON_FINITE}"
_DISTRIBUTION = f"the distribution that it was drawn from holds NaN or infinity; {NON_FINITE}"
# Where it is, [B, N] bool, the values that are wrong there, what is said of them.
Problem = tuple[Tensor, Tensor, str]


def unfit(target: Scorer, size: int, new: int) -> str:
    """Return why a prompt of `size` tokens cannot have an answer of `new`; empty when it
    can. An answer may be ended by the context, but not by the end of LongRoPE's first
    range."""
    if size >= target.context_length:
        return f"has {size} tokens and the target's context holds {target.context_length}"
    if target.first_range and size + new > target.first_range:
        return (
            f"has {size} tokens, and {new} new ones cross {target.first_range}, where the "
            f"target's rotary embedding changes (LongRoPE): {target.first_range - size} would fit"
        )
    return ""


def longest_answer(request: Request, index: int, target: Scorer) -> int:
    """Return tokens that request number `index` may get: those it asks for, as far as the
    target's context goes.

    Raises UserError for a prompt that is empty, fills the context or leaves the vocabulary, and
    for a text that would cross LongRoPE's first range."""
    longest = max(len(request.prompt), len(request.uncond or ()))
    if not -(1 << 63) <= request.id < 1 << 63:
        raise UserError(
            f"request {index}: its id {request.id} is no 64-bit number; give one below 2**63"
        )
    if not request.prompt:
        raise UserError(f"request {index}: the prompt is empty; give at least one token")
    if why := unfit(target, longest, request.max_new_tokens):
        raise UserError(f"request {index}: the prompt {why}; shorten the prompt")
    vocab = target.vocab_size
    wrong = next(
        (t for t in (*request.prompt, *(request.uncond or ())) if not 0 <= t < vocab), None
    )
    if wrong is not None:
        raise UserError(
            f"request {index}: token {wrong} is outside the target's vocabulary "
            f"0..{vocab - 1}; "
            "tokenize the prompt with the target's own tokenizer"
        )
    return min(request.max_new_tokens, target.context_length - longest)


def check_shape(drafter: Drafter, target: Target) -> None:
    """Raise UserError for a drafter of trees on a target whose states go along one path alone."""
    if drafter.shape == "tree" and target.probe().states is not None:
        parts = ", ".join(part.name for part in getattr(drafter, "parts", ()))  # of a union
        what = "joins drafts into a tree" if parts else "drafts a tree"
        raise UserError(
            f"drafter: {drafter.name} {what}, and {type(target.body).__name__} has states, "
            "recurrent or of convolutions, that go along one path alone; "
            + (f"use its parts singly, as chains ({parts})" if parts else "use a chain (@chain)")
        )


def check_form(tree: DraftTree, max_nodes: int | None = None) -> None:
    """Raise ValueError for wrong shapes or dtypes, or for more than `max_nodes` nodes."""
    shapes = tree.tokens.shape, tree.parents.shape, tree.size.shape
    if not (shapes[0] == shapes[1] and shapes[2] == shapes[0][:1]):
        words = "tokens {}, parents {}, size {}".format(*map(tuple, shapes))
        raise ValueError(f"draft tree: shapes differ: {words}")
    for name in ("tokens", "parents", "size"):
        if (dtype := getattr(tree, name).dtype) != torch.int64:
            raise ValueError(f"draft tree: {name} must be int64, not {dtype}")
    if max_nodes is not None and tree.width > max_nodes:
        raise ValueError(f"draft tree: {tree.width} nodes exceed the budget of {max_nodes}")


def validate(tree: DraftTree, vocab_size: int, max_nodes: int | None = None) -> None:
    """Raise ValueError naming row and node when the tree is malformed, UserError when the
    drafter's distribution is not finite. One host round trip where all is well."""
    check_form(tree, max_nodes)
    if not bool(doubtful(tree, vocab_size).any()):
        return
    # A distribution that is not finite makes twins as well, and is what the user can mend.
    problems = [*_non_finite(tree), *_malformed(tree, vocab_size)]
    bad, values, why = next(problem for problem in problems if bool(problem[0].any()))
    row, node = bad.nonzero()[0].tolist()
    place = f"row {row}, node {node}:"
    if why in (_SCORE, _DISTRIBUTION):
        raise UserError(f"drafter: {place} {why}; nothing was committed")
    why = why.format(value=values[row, node].item())
    raise ValueError(f"draft tree: {place} {why}")


def doubtful(tree: DraftTree, vocab_size: int) -> Tensor:
    """Return [B] bool, rows that `validate` would refuse, without asking the device."""
    found = [bad for bad, _, _ in _malformed(tree, vocab_size)]  # NaN does not sum to one
    if tree.score is not None and tree.width:
        found.append(_used(tree) & ~tree.score.isfinite())
    return torch.stack([bad.any(1) for bad in found]).any(0)


def non_finite(tree: DraftTree) -> Tensor:
    """Return [B, N] bool, nodes whose score, or the distribution that they were drawn from, is
    not finite, without asking the device."""
    found = [bad for bad, _, _ in _non_finite(tree)]
    return torch.stack([torch.zeros_like(tree.tokens, dtype=torch.bool), *found]).any(0)


def cut(tree: DraftTree, nodes: Tensor) -> DraftTree:
    """Return the tree of every row up to the first of `nodes` [B, N] bool; rows without one
    keep every node and number.

    Nodes before that one are judged although those after it are not: whether a node is judged
    may depend on tokens that were drawn before it alone. A draft dropped whole for what was
    found deep in it would be dropped for its own tokens, and what is drawn in their place is
    biased."""
    if not tree.width:
        return tree
    node = torch.arange(tree.width, device=nodes.device)
    first = torch.where(nodes, node, tree.width).amin(1)
    return replace(tree, size=torch.minimum(tree.size, first))


def _used(tree: DraftTree) -> Tensor:
    return torch.arange(tree.width, device=tree.size.device) < tree.size[:, None]


def _drawn_from(proposal: Proposal, values: Tensor) -> Tensor:
    """`values` [B, P] of the distributions, at the nodes [B, N] that were drawn from them. A
    deterministic node's row may be anything."""
    row = proposal.row.clamp(0, values.shape[1] - 1)
    return values.gather(1, row)


def _non_finite(tree: DraftTree) -> Iterator[Problem]:
    """Yield what a drafter whose numbers overflow makes of a tree."""
    if tree.score is not None and tree.width:
        yield _used(tree) & ~tree.score.isfinite(), tree.tokens, _SCORE
    if tree.sampled is not None and tree.proposal is not None and tree.width:
        total = tree.proposal.probs.sum(-1, dtype=torch.float64)
        if total.shape[1]:
            bad = _drawn_from(tree.proposal, ~total.isfinite())
            yield _used(tree) & tree.sampled & bad, tree.proposal.row, _DISTRIBUTION


def _malformed(tree: DraftTree, vocab_size: int) -> Iterator[Problem]:
    """Yield what else can be wrong with the values."""
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
    yield twin.any(-1), tokens, "token {value} occurs twice among its siblings"
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
