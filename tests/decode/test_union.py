"""Unions of drafters: exact by enumeration whatever is joined, the first drafter's tree left as it
is, and what cannot be joined refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.adaptive import Adaptive
from outrider.decode.checks import validate
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.ngram import NGram, listed
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.union import Union, joined
from outrider.decode.verify import Verdict, verify
from outrider.heads.checkpoint import save_head
from outrider.heads.drafters import drafter_folders, resolve_drafter
from outrider.heads.names import DraftSpec, parse
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from tests.contract.cases import CASES, moved
from tests.helpers.engine_distribution import (
    TableDrafter,
)
from tests.helpers.training import tiny_target

CPU = torch.device("cpu")
TEMPERATURES = (0.0, 0.1, 0.3, 1.0, 2.0, 5.0)
Nodes = list[tuple[int, int]]


def some_nodes(generator: torch.Generator, vocab: int, depth: int, most: int) -> Nodes:
    """A random tree of at most `most` different nodes: half of them in one chain, as an
    n-gram's."""
    found: Nodes = []
    for _ in range(int(torch.randint(most + 1, (), generator=generator))):
        above = int(torch.randint(-1, len(found), (), generator=generator))
        if bool(torch.rand((), generator=generator) < 0.5):
            above = len(found) - 1
        token = int(torch.randint(vocab, (), generator=generator))
        level, up = 1, above
        while up >= 0:
            level, up = level + 1, found[up][1]
        if level <= depth and (token, above) not in found:
            found.append((token, above))
    return found


def with_nodes(*others: Nodes) -> Callable[[DraftTree], DraftTree]:
    """Joins the same deterministic trees to every row of a draft."""

    def join(tree: DraftTree) -> DraftTree:
        rows = tree.tokens.shape[0]
        return joined([tree, *(listed([nodes] * rows, CPU) for nodes in others)])

    return join


def enumerated(seed: int, count: int) -> tuple[int, int]:
    """(drawn worlds, worlds in which a joined node repeats one of the first drafter's)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = repeats = 0
    for number in range(count):
        case = Case.random(generator, max_nodes=3)
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        case.sampling = replace(case.sampling, temperature=temperature)
        depth = case.shape.depth
        others = [some_nodes(generator, case.vocab, depth, most) for most in (3, 2)]
        name = f"case {number} of seed {seed}: {case.scheme} {case.shape.paths} {others}"
        join, added = with_nodes(*others), sum(map(len, others))

        def checked(tree: DraftTree, vocab=case.vocab, join=join, added=added) -> DraftTree:  # type: ignore[no-untyped-def]
            nonlocal repeats
            most, tree = tree.size + added, join(tree)
            validate(tree, vocab)
            repeats += int((tree.size < most).any())
            return tree

        alone, union = enumerate_case(case, verify), enumerate_case(case, verify, checked)
        assert union.error <= 1e-12, name
        assert union.accepted >= alone.accepted - 1e-12, name
        drawn += case.scheme != "top" and not case.sampling.greedy
    return drawn, repeats


def test_unions_have_the_exact_distribution() -> None:
    """Chains and trees, cut ones, draws with and without replacement, draft vocabularies that
    lack a token, two others at once; never less accepted than by the first alone."""
    drawn, repeats = enumerated(0, 48)
    assert drawn > 15 and repeats > 15


# --- what a joined tree holds


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The token paths of one row's nodes."""
    found: list[tuple[int, ...]] = []
    for i in range(int(tree.size[row])):
        above = int(tree.parents[row, i])
        found.append((*(found[above] if above >= 0 else ()), int(tree.tokens[row, i])))
    return set(found)


def test_a_joined_tree_holds_all_paths_and_the_first_tree_in_front() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        trees = [
            listed([some_nodes(generator, 4, 4, most) for _ in range(3)], CPU) for most in (6, 5, 3)
        ]
        tree = joined(trees)
        validate(tree, 4, 14)
        for row in range(3):
            own = [paths(one, row) for one in trees]
            assert paths(tree, row) == set().union(*own)
            size = int(trees[0].size[row])
            assert torch.equal(tree.tokens[row, :size], trees[0].tokens[row, :size])
            assert torch.equal(tree.parents[row, :size], trees[0].parents[row, :size])


# --- drafters


@pytest.mark.parametrize(
    "name", ["medusa", "eagle1", "eagle3", "dflash", "draft model", "draft model of that context"]
)
def test_a_row_may_be_full_when_another_accepts_a_long_match(name: str) -> None:
    """An n-gram of another row is accepted whole, deeper than this drafter goes: the pass over
    what was accepted is padded beyond the end of a row that has no room left."""
    target, most, deep = tiny_target("float64", layers=2), 40, 30
    if name == "draft model":
        part: Drafter = DraftModel(target, 1)
    elif name == "draft model of that context":
        part = DraftModel(tiny_target("float64", layers=2, context=most), 1)
    else:
        _, head = moved(CASES[name], "float64")
        part = head.drafter(target, DraftSpec(shape="chain"))
    texts = torch.randint(3, 60, (2, most), generator=torch.Generator().manual_seed(0))
    width = target.model.config.hidden_size
    feats = torch.randn(2, most, len(part.taps), width, dtype=torch.float64)

    def summary(drafter: Drafter, rows: list[int]) -> DraftTree:
        drafter.reset(len(rows), most)
        first = torch.tensor([most - 1, 2])[rows]  # tokens that each row has seen
        begun = zip(rows, first.tolist(), strict=True)
        drafter.begin([texts[row, :count] for row, count in begun], Sampling())
        order = [part.taps.index(tap) for tap in drafter.taps]  # a union's stand in its own order
        seen = feats[rows][:, :, order] if part.taps else None
        shown = None if seen is None else seen[:, : int(first.max())]
        every = slice(0, len(rows))
        drafter.observe(texts[rows][:, 1 : 1 + int(first.max())], shown, first, every)
        fresh = torch.tensor([1, deep])[rows]
        news = int(fresh.max())
        shown = None if seen is None else seen[:, :news]
        drafter.observe(texts[rows][:, :news], shown, fresh, every)
        budget = torch.tensor([0, 1])[rows]
        rng = Rng(0, torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))
        return part.propose(budget, Sampling(), rng)

    alone = summary(part, [1])
    beside = summary(Union([part, NGram(deep)]), [0, 1])
    assert beside.size.tolist()[0] == 0 and alone.size.tolist()[0] > 0
    assert paths(beside, 1) == paths(alone, 0)


class Sometimes(TableDrafter):
    """A drawn chain of one token, for rows whose last token is 1 alone."""

    def propose(self, budget: torch.Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return super().propose(torch.where(self.last == 1, budget, 0), sampling, rng)


def test_a_row_of_which_nothing_was_drawn_is_verified_alone_as_beside_others() -> None:
    """The drafter that draws has nothing for some rows where an n-gram has: a walk alone and the
    rule beside a drawn row would use other random numbers."""
    table = Sometimes(TreeShape.chain(1), "iid", 4)

    def verdict(last: list[int]) -> Verdict:
        count, union = len(last), Union([table, NGram(nodes=2)])
        union.reset(count, 8)
        union.begin([torch.tensor([token, 2]) for token in last], Sampling(1.0))
        text = torch.tensor([[2, token] for token in last])
        union.observe(text, None, torch.full((count,), 2), slice(0, count))
        rng = Rng(0, torch.arange(count), torch.zeros(count, dtype=torch.int64))
        tree = union.propose(torch.ones(count, dtype=torch.int64), Sampling(1.0), rng)
        validate(tree, 4, union.max_nodes)
        assert tree.sampled is not None
        assert bool(tree.sampled.any()) == (1 in last)
        distribution = Distribution(Sampling(1.0), torch.zeros(count, tree.width + 1, 4), tree)
        return verify(tree, distribution, rng)

    alone, beside = verdict([3] * 64), verdict([3] * 64 + [1])
    assert 0 < int(alone.length.sum()) < 64
    assert torch.equal(alone.length, beside.length[:64])
    assert torch.equal(alone.bonus, beside.bonus[:64])


# --- names that cannot be joined


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    """Saved heads of one target, by the name of their case."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("medusa", "eagle3"):
        target, head = moved(CASES[name], "float64")
        save_head(head, folder / name / "head", target.identity)
    return folder, tiny_target("float64", layers=2)


def test_a_union_is_resolved_by_name(runs: tuple[Path, Target]) -> None:
    folder, target = runs
    spec = f"ngram@tree:6+{folder}/eagle3@tree+{folder}/medusa@adaptive"
    drafter = resolve_drafter(spec, target)
    assert isinstance(drafter, Adaptive) and drafter.name == spec
    union = drafter.inner
    assert isinstance(union, Union)
    named = [f"{folder}/eagle3@tree", f"{folder}/medusa", "ngram@tree:6"]
    assert [part.name for part in union.parts] == named
    assert [f.parent.name for f in drafter_folders(parse(spec))] == ["eagle3", "medusa"]


def test_what_cannot_be_joined_costs_one_line(runs: tuple[Path, Target]) -> None:
    folder, target = runs
    wrong = {
        "ngram+ngram@tree": "ngram is given twice; join different drafters",
        f"{folder}/medusa@tree+{folder}/medusa/head@chain": "is given twice; join different",
        f"{folder}/medusa+{folder}/gone": "gone",
    }
    for spec, line in wrong.items():
        with pytest.raises(UserError) as summary:
            resolve_drafter(spec, target)
        assert line in str(summary.value) and "\n" not in str(summary.value), spec


def test_a_second_drafter_whose_scores_are_nan_adds_what_stands_before() -> None:
    wild = replace(listed([[(3, -1), (4, 0)]], CPU), score=torch.tensor([[0.0, torch.nan]]))
    assert paths(joined([DraftTree.empty(1), wild]), 0) == {(3,)}
