"""The rule for one level of siblings, held against a scalar loop over the formulas, against sums
over every branch, and against the rule on the whole vocabulary where it saw the draft's alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.decode.residual import LevelVerdict, Siblings, level
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.siblings import groups
from outrider.decode.tree import DraftTree, Proposal, TreeShape


def float64(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def siblings_of(p: Tensor, q: Tensor, tokens: list[int], drawn: list[bool]) -> Siblings:
    """One slot [1] whose children were drawn one after the other without replacement."""
    left, scale, given = q.clone(), [], []
    for token, sampled in zip(tokens, drawn, strict=True):
        scale.append(1 / float(left.sum()) if sampled else 0.0)
        given.append(float(left[token] / left.sum()) if sampled else 1.0)
        left[token] = 0
    column = torch.tensor([tokens])
    return Siblings(p[None], q[None], column, float64([scale]), float64([given]))


def formulas(p: Tensor, q: Tensor, tokens: list[int], drawn: list[bool], w: float) -> LevelVerdict:
    """The docstring's formulas, with normalised distributions q_j."""
    residual, failed, accept = w * p, 1.0, []
    for j, token in enumerate(tokens):
        of_child = torch.zeros_like(q)
        if drawn[j]:
            of_child = q.clone()
            of_child[tokens[:j]] = 0
            of_child /= of_child.sum()
        else:
            of_child[token] = 1
        accept.append(min(1.0, float(residual[token] / (failed * of_child[token]))))
        residual = (residual - failed * of_child).clamp(min=0)
        residual[token] = 0
        failed = float(residual.sum()) + 1 - w or 1e-300  # nothing was left to fail
    return LevelVerdict(
        float64([accept]), residual[None], float64([float(residual.sum()) / failed])
    )


def random_slot(seed: int, count: int) -> tuple[Tensor, Tensor, list[int]]:
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, 6, generator=g, dtype=torch.float64) * 1.5).softmax(-1)
    return p, q, torch.multinomial(q, count, generator=g).tolist()


@pytest.mark.parametrize(
    "drawn, w", [([True] * 3, 1.0), ([False, True, True], 0.7), ([True, False], 0.05)]
)
def test_level_is_the_formulas(drawn: list[bool], w: float) -> None:
    for seed in range(20):
        p, q, tokens = random_slot(seed, len(drawn))
        found = level(siblings_of(p, q, tokens, drawn), float64([w]))
        for got, wanted in zip(found, formulas(p, q, tokens, drawn, w), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-14, rtol=1e-12)


def test_a_child_that_is_not_there_changes_nothing() -> None:
    p, q, tokens = random_slot(4, 1)
    one = siblings_of(p, q, tokens, [True])
    column = torch.cat([one.column, one.column], 1)  # where its eldest left nothing
    more = float64([[0.0]]), float64([[1.0]])
    two = Siblings(
        *one[:2], column, *(torch.cat([a, b], 1) for a, b in zip(one[3:], more, strict=True))
    )
    reach = float64([0.6])
    alone, beside = level(one, reach), level(two, reach)
    torch.testing.assert_close(beside.accept, float64([[float(alone.accept), 0.0]]))
    torch.testing.assert_close(beside[1:], alone[1:], atol=1e-15, rtol=0)


@pytest.mark.parametrize("seed, outside", [(0, False), (1, True), (2, True)])
def test_draft_vocabulary_is_the_whole_on_fewer_columns(seed: int, outside: bool) -> None:
    """The same tree, its draft on 4 of 7 tokens or on all of them with no mass outside:
    equal chances, equal remains. outside: the second sibling is no token of the draft's."""
    g = torch.Generator().manual_seed(seed)
    vocab = torch.tensor([0, 2, 3, 6])
    narrow = (3 * torch.randn(1, 1, 4, generator=g, dtype=torch.float64)).softmax(-1)
    wide = torch.zeros(1, 1, 7, dtype=torch.float64).index_copy(2, vocab, narrow)
    logits = torch.randn(1, 3, 7, generator=g, dtype=torch.float64)
    row, drawn = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[True, not outside]])
    found = []
    for proposal in (Proposal(narrow, row, vocab), Proposal(wide, row)):
        shape = TreeShape.of([(0,), (1,)])
        tokens = torch.tensor([[3, 5 if outside else 6]])
        tree = DraftTree.static(shape, tokens, None, drawn, proposal)
        chance = torch.tensor([[1.0, 0, 0, 0]])
        (group,) = groups(tree, Distribution(Sampling(1.0), logits, tree), chance)
        step = level(group.siblings, float64([0.8]))
        left = group.left(step.residual, torch.tensor([0])).probs
        found.append((group.siblings.p.shape[1], step.accept, step.rest, left / left.sum()))
    (columns, *seen), (every, *whole) = found
    assert (columns, every) == (7, 7)  # 4, two siblings and the rest; all
    torch.testing.assert_close(seen, whole, atol=1e-14, rtol=0)
