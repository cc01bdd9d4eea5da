"""Draft trees: masks, children, order, static shapes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from outrider.conf.errors import UserError
from outrider.decode.checks import validate
from outrider.decode.grow import Nodes, dynamic, rerank
from outrider.decode.tree import DraftTree, Proposal, TreeLayout, TreeShape


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 24)))]


def ancestors(parents: list[int], i: int) -> list[int]:
    out = [i]
    while parents[out[-1]] != -1:
        out.append(parents[out[-1]])
    return out


@settings(max_examples=300, deadline=None, derandomize=True)
@given(parent_lists())
def test_layout_against_plain_python(parents: list[int]) -> None:
    n = len(parents)
    layout = TreeLayout.of(torch.tensor([parents], dtype=torch.int64).reshape(1, n))
    for i in range(n):
        path = ancestors(parents, i)
        assert int(layout.depth[0, i]) == len(path) - 1
        assert layout.mask[0, i + 1].nonzero()[:, 0].tolist() == sorted([0, *(p + 1 for p in path)])
        siblings = [j for j in range(n) if parents[j] == parents[i]]
        assert int(layout.rank[0, i]) == siblings.index(i)
    inner = layout.inner
    below = {slot: [j for j in range(n) if parents[j] == slot - 1] for slot in range(n + 1)}
    slots, table = inner.slots[0].tolist(), inner.kids[0].tolist()
    assert {s: [k for k in kids if k < n] for s, kids in zip(slots, table, strict=True)} == {
        slot: kids for slot, kids in below.items() if kids
    }
    for level, (start, stop, most) in enumerate(span for run in inner.runs for span in run):
        here = slots[start:stop]
        assert layout.positions[0, here].tolist() == [level] * len(here)
        assert most == max(len(below[slot]) for slot in here)

    def postorder(slot: int) -> list[int]:
        return [x for j in range(n) if parents[j] == slot - 1 for x in postorder(j + 1)] + [slot]

    assert layout.postorder[0].tolist() == postorder(0)
    assert layout.levels == max((len(ancestors(parents, i)) for i in range(n)), default=0)


def test_static_shape_is_level_by_level_and_cut_by_budget() -> None:
    shape = TreeShape.of([[1], [0, 0], [0], [0, 1], [1, 0], [0, 0, 0]])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert shape.size_at(torch.tensor([-1, 0, 1, 2, 3, 9])).tolist() == [0, 0, 2, 5, 6, 6]
    assert [list(shape.level(d)) for d in range(3)] == [[0, 1], [2, 3, 4], [5]]
    tree = DraftTree.static(shape, torch.arange(12).reshape(2, 6))
    assert tree.layout.positions.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert TreeShape.chain(3).paths == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize("paths", [[[0, 0]], [[1]], [[-1]], [[]]])
def test_bad_shapes(paths: list[list[int]]) -> None:
    with pytest.raises(UserError, match=r"tree: path \["):
        TreeShape.of(paths)


def tree(tokens: list[int], parents: list[int], **more: object) -> DraftTree:
    n = len(tokens)
    return DraftTree(
        torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([more.pop("size", n)]), **more
    )


SURE = Proposal(torch.tensor([[[0.5, 0.5, 0.0, 0.0]]]), torch.zeros(1, 2, dtype=torch.int64))
BOTH = torch.ones(1, 2, dtype=torch.bool)
NARROW = torch.full((1, 1, 3), 1 / 3)
MINUS = torch.tensor([[[0.6, 0.6, -0.2, 0.0]]])


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (tree([1, 2], [-1, 1]), "node 1: parent 1"),  # its own parent
        (tree([1, 2], [1, -1]), "node 0: parent 1"),  # parent after child
        (tree([1, 9], [-1, 0]), "node 1: token 9 outside the vocabulary"),
        (tree([1, 1], [-1, -1]), "occurs twice"),
        (tree([1, 2], [-1, 0], size=3), "size"),
        (tree([0, 1], [-1, 0], sampled=BOTH), "without the proposal"),
        (tree([0, 2], [-1, 0], sampled=BOTH, proposal=SURE), "no mass"),
        (tree([0, 0], [-1, -1], sampled=BOTH, proposal=SURE), "occurs twice"),
        (
            tree([0, 1], [-1, 0], sampled=BOTH, proposal=Proposal(SURE.probs * 0.5, SURE.row)),
            "sum to one",
        ),
        (
            tree([0, 1], [-1, 0], sampled=BOTH, proposal=Proposal(MINUS, SURE.row)),
            "negative",
        ),
        (DraftTree(torch.tensor([[1.0]]), torch.tensor([[-1]]), torch.tensor([1])), "int64"),
        (
            DraftTree(torch.tensor([[1]]), torch.tensor([[-1, 0]]), torch.tensor([1])),
            "shapes differ",
        ),
        (
            tree([0, 1], [-1, 0], sampled=BOTH, proposal=Proposal(SURE.probs[:, :0], SURE.row)),
            "of a proposal without distributions",
        ),
        # A distribution over three tokens has no place for token 3: what stands last is not
        # read for it.
        (tree([0, 3], [-1, 0], sampled=BOTH, proposal=Proposal(NARROW, SURE.row)), "3 has no mass"),
    ],
)
def test_malformed_trees_name_row_and_value(bad: DraftTree, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        validate(bad, 4)


def test_a_score_that_is_not_finite_counts_where_the_node_is_used() -> None:
    wild = torch.tensor([[0.0, float("nan")]])
    chain = tree([1, 2], [-1, 0])
    with pytest.raises(UserError, match="row 0, node 1: its score is NaN"):
        validate(replace(chain, score=wild), 4)
    validate(replace(chain, size=torch.tensor([1]), score=wild), 4)  # padding is never read


def test_a_drafter_all_of_whose_scores_are_nan_is_refused() -> None:
    """It would pass for one that has nothing to propose."""
    score = torch.tensor([[0.0, -1.0, -torch.inf], [torch.nan] * 3])
    token = torch.tensor([[1, 2, 3]]).expand(2, 3)
    tree = rerank(score, token, torch.full((2, 3), -1), torch.zeros(3, dtype=torch.int64), 1, 3)
    assert tree.size.tolist() == [2, 3], "a candidate of score -inf is none"
    with pytest.raises(UserError, match="row 1, node 0: its score is NaN"):
        validate(tree, 4)


class Table:
    """A source of drafts whose logits follow from the token above alone."""

    device = torch.device("cpu")

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(size + 1, size, dtype=torch.float64, generator=generator) * 2
        self.rows = 0

    def draft_ids(self) -> None:
        return None

    def open(self, levels: int) -> torch.Tensor:
        return self.logits[-1].expand(1, 1, -1)

    def level(self, nodes: Nodes) -> torch.Tensor:
        self.rows += nodes.tokens.shape[1]
        return self.logits[nodes.tokens]


@pytest.mark.parametrize("nodes", [1, 9])
def test_a_dynamic_tree_holds_the_likeliest_paths_and_grows_no_more(nodes: int) -> None:
    """Against all paths of three levels."""
    for seed in range(20):
        source = Table(7, seed)
        distribution = source.logits.log_softmax(-1)
        score = {(): 0.0}
        for depth in range(3):
            for path in [p for p in score if len(p) == depth]:
                below = distribution[path[-1] if path else -1]
                score |= {(*path, t): score[path] + float(below[t]) for t in range(7)}
        best = sorted((p for p in score if p), key=lambda p: -score[p])[:nodes]
        tree = dynamic(source, 3, torch.tensor([3]), 9, nodes)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert set(paths) == set(best)
        assert source.rows <= nodes * (nodes - 1)


def test_well_formed_trees_pass() -> None:
    validate(tree([1, 2, 1], [-1, -1, 0]), 4)
    validate(tree([1, 99], [-1, 0], size=1), 4)  # padding is never read
    validate(
        tree([0, 0], [-1, -1], sampled=BOTH, proposal=Proposal(SURE.probs, SURE.row, None, True)), 4
    )
    validate(DraftTree.empty(3), 4)
    with pytest.raises(ValueError, match="budget of 2"):
        validate(tree([1, 2, 1], [-1, -1, 0]), 4, 2)
