"""Growth at a price: exact by enumeration for chains, drawn and dynamic trees, every row by itself,
and a rule that looks at what it decides about is caught."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import grow, waits
from outrider.decode.cost import Price
from outrider.decode.engine import Request, generate
from outrider.decode.grow import Form
from outrider.decode.price import Growth, awaited
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.verify import RULES, verify
from outrider.scripts.lab.proofs.confident import Confident, ConfidentTable
from outrider.scripts.proofs.engine_distribution import engine_distribution, toy_model
from outrider.scripts.proofs.enumerator import enumerate_case

SMALL = TreeShape.of([(0,), (1,), (0, 0), (1, 0), (0, 1)])
TEMPERATURES = (0.0, 0.3, 1.0, 2.0)
SOME = Price(0.15, 0.45)
FORMS = {
    "chain": Form.chain(2, Price(0.25, 0.4)),
    "drawn": Form("tree", 2, len(SMALL), SMALL, price=SOME),
    "dynamic": Form.tree(2, 4, 2, None, SOME),
}


def worlds(seed: int, count: int) -> tuple[int, int]:
    """Enumerates random worlds; (those whose drafts were drawn, those of which some rows lost
    nodes that others kept)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = ragged = 0
    for number in range(count):
        case = Confident.random(generator)
        sizes: set[int] = set()

        def seen(tree: DraftTree, case: Confident = case, sizes: set[int] = sizes) -> DraftTree:
            tree.validate(case.vocab, len(case.shape))
            sizes.update(tree.size.tolist())
            return tree

        for rule in RULES:
            found = enumerate_case(case, functools.partial(verify, rule=rule), seen)
            assert found.error <= 1e-12, (seed, number, rule, case.form)
        drawn += case.form.static is not None and not case.sampling.greedy
        ragged += len(sizes) > 1
    return drawn, ragged


@pytest.mark.parametrize("free", [True, False])
def test_growth_at_a_price_has_the_exact_distribution(
    free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not free:
        monkeypatch.setattr(waits, "free", lambda tensor: False)
    drawn, ragged = worlds(int(free), 120)
    assert drawn > 60 and ragged > 15


@pytest.mark.slow
@pytest.mark.parametrize("free", [True, False])
def test_growth_at_a_price_has_the_exact_distribution_in_many_worlds(
    free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not free:
        monkeypatch.setattr(waits, "free", lambda tensor: False)
    for seed in (2, 3, 4):
        worlds(seed, 300)


class Peeking(Growth):
    """Decides by the token that was drawn: what `tell` learns of a node leaves it out."""

    def tell(self, number: Tensor, chance: Tensor) -> None:
        super().tell(number, chance)
        self.there[:, number] &= self.chance[:, number] >= self.price.node
        self.open[:, self.place[number]] &= self.there[:, number]


@pytest.mark.parametrize("kind", ["chain", "drawn"])
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_the_whole_loop_has_the_exact_distribution_unless_it_peeks(
    rule: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[kind]

    def error(sampling: Sampling) -> float:
        drafter = ConfidentTable(form, 3)
        found = engine_distribution(
            toy_model(vocab=3), drafter, [1, 2], 3, sampling, rule, form.static
        )
        assert found.outputs > 3
        return found.error

    assert error(Sampling(1.0)) <= 1e-12
    assert error(Sampling(0.7, top_k=2)) <= 1e-12
    monkeypatch.setattr(grow, "Growth", Peeking)
    assert error(Sampling(1.0)) > 1e-3


@pytest.mark.parametrize("kind", list(FORMS))
def test_no_row_depends_on_its_neighbours(kind: str) -> None:
    """Tokens and cycles of a request alone, beside others, and where nobody may be asked."""
    target = toy_model()
    requested = [Request([3, 1 + i, 4], 12, id=i) for i in range(5)]
    depths: set[int] = set()
    for temperature in TEMPERATURES:
        found = []
        for rows in (1, 2, 5):
            drafter = ConfidentTable(FORMS[kind], 8)
            run = generate(
                target, drafter, requested, Sampling(temperature), batch_size=rows, eos_ids=()
            )
            found.append([(g.token_ids, [c.accepted for c in g.cycles]) for g in run.generations])
        assert found[0] == found[1] == found[2]
        depths.update(c.proposed for g in run.generations for c in g.cycles if not c.cut)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waits, "free", lambda tensor: False)
            drafter = ConfidentTable(FORMS[kind], 8)
            run = generate(
                target, drafter, requested, Sampling(temperature), batch_size=2, eos_ids=()
            )
        again = [(g.token_ids, [c.accepted for c in g.cycles]) for g in run.generations]
        assert again == found[0]
    assert len(depths) > 1, "the draft never changed: the test saw a constant rule"


@pytest.mark.parametrize("kind", list(FORMS))
def test_without_a_price_nothing_changes_and_a_higher_one_leaves_a_part_of_it(kind: str) -> None:
    form = FORMS[kind]
    for temperature in (0.0, 1.0):
        sizes = []
        for node in (0.0, 1e-30, 0.1, 0.3, 0.6, 1.1):
            drafter = ConfidentTable(replace(form, price=Price(node)), 8)
            drafter.begin([torch.tensor([i]) for i in range(8)], Sampling())
            rng = Rng(0, torch.arange(8), torch.zeros(8, dtype=torch.int64))
            tree = drafter.propose(torch.full((8,), 2), Sampling(temperature), rng)
            tree.validate(8, form.nodes)
            sizes.append(tree.size)
        assert torch.equal(sizes[0], sizes[1])
        assert all(bool((a >= b).all()) for a, b in zip(sizes, sizes[1:], strict=False))
        assert int(sizes[2].sum()) > int(sizes[4].sum()) and not bool(sizes[-1].any())


def test_a_distribution_that_is_not_finite_is_refused_at_a_price_too() -> None:
    for kind, form in FORMS.items():
        drafter = ConfidentTable(form, 8)
        drafter.table[:] = torch.nan
        sampling = Sampling(0.0 if kind == "dynamic" else 1.0)
        with pytest.raises(UserError, match="NaN"):
            generate(toy_model(), drafter, [Request([3, 1], 4)], sampling)


@pytest.mark.parametrize("kind", list(FORMS))
@pytest.mark.parametrize("free", [True, False])
def test_a_row_that_is_not_finite_is_named_also_where_nothing_is_drawn(
    kind: str, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "free", lambda tensor: free)
    for wrong in (torch.nan, torch.inf):
        drafter = ConfidentTable(FORMS[kind], 8)
        drafter.table[4, 3] = wrong
        requested = [Request([3, 1], 6, id=0), Request([3, 4], 6, id=1)]
        with pytest.raises(UserError, match="row 1, node 0.*NaN"):
            generate(toy_model(), drafter, requested, Sampling(0.0), batch_size=2, eos_ids=())


class Outspoken(ConfidentTable):
    """Has a word of its own about chains: it trusts none of their nodes."""

    def chance(self) -> Tensor:
        return torch.zeros(len(self.last), 1)


def test_a_tree_that_is_cut_to_a_chain_is_judged_as_the_tree_it_is() -> None:
    """Else a neighbour with a larger budget would decide by what a row's own draft is judged."""
    fork = TreeShape.of([(0,), (0, 0), (0, 0, 0), (0, 0, 1)])
    drafter = Outspoken(Form("tree", 3, len(fork), fork, price=Price(1e-9)), 8)
    sizes = []
    for budget in ([2, 2], [2, 3]):
        drafter.begin([torch.tensor([1]), torch.tensor([2])], Sampling())
        rng = Rng(0, torch.arange(2), torch.zeros(2, dtype=torch.int64))
        sizes.append(drafter.propose(torch.tensor(budget), Sampling(1.0), rng).size.tolist())
        drafter.reset(2, 16)
    assert sizes == [[2, 2], [2, 4]]


@pytest.mark.parametrize("wrong", [-1.0, -1e-300, -torch.inf, torch.nan])
def test_what_is_no_price_is_refused(wrong: float) -> None:
    for name in ("node", "level"):
        with pytest.raises(ValueError, match="from 0 on"):
            Price(**{name: wrong})
    assert not Price(torch.inf).nothing and Price(-0.0).nothing


def test_what_a_draw_awaits() -> None:
    distribution = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.2, 0.0]])
    assert awaited(distribution).tolist() == pytest.approx([1.0, 0.5, 0.0, 0.2])
    assert str(Price(0.05, 0.2)) == "0.05 a node, 0.2 a level" and Price().nothing
