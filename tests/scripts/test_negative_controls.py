"""A test of the tests: wrong rules, wrong drafts and wrong random numbers are found where the
correct code passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.rng import ACCEPT, Rng, inverse_cdf
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import verify
from outrider.scripts.certificate import controls
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from tests.helpers import wrong_rules
from tests.helpers.engine_distribution import (
    TableDrafter,
    engine_distribution,
    toy_model,
)

ONE, CHAIN = Sampling(1.0), TreeShape.chain(2)
STAR, BUSHY = TreeShape.of([(0,), (1,), (2,)]), TreeShape.of([(0,), (1,), (0, 0), (0, 1)])

# a rule, and the drafts that show that it is wrong
WRONG: dict[str, tuple[Any, TreeShape, str, Sampling]] = {
    "typical acceptance": (wrong_rules.typical_acceptance, BUSHY, "top", ONE),
    "rejected token stays": (wrong_rules.rejected_token_stays, STAR, "top", ONE),
    "bonus un-warped": (wrong_rules.bonus_unwarped, CHAIN, "iid", Sampling(0.6)),
    "softmax acceptance": (wrong_rules.softmax_acceptance, CHAIN, "top", Sampling(0.0)),
    "bonus from the draft": (wrong_rules.bonus_from_the_draft, CHAIN, "iid", ONE),
    "greedy at T > 0": (wrong_rules.greedy_fallback, CHAIN, "iid", ONE),
    "no residual": (controls.without_residual(verify), CHAIN, "iid", ONE),
}


def case_of(shape: TreeShape, scheme: str, sampling: Sampling) -> Case:
    generator = torch.Generator().manual_seed(7)
    tables = 1.5 * torch.randn(2, 5 ** (shape.depth + 1), 4, generator=generator).double()
    return Case(4, shape, scheme, sampling, *tables)


def test_a_wrong_rule_is_found_by_enumeration() -> None:
    for name, (rule, *drafts) in WRONG.items():
        case = case_of(*drafts)
        assert enumerate_case(case, rule).error > 1e-3, name
        assert enumerate_case(case, verify).error <= 1e-12, name
    case = case_of(STAR, "without", ONE)
    assert enumerate_case(case, verify, wrong_rules.without_scored_as_with).error > 1e-3


def test_a_wrong_cache_or_mask_is_found_by_enumeration() -> None:
    shape = TreeShape.of([(0,), (1,)])
    for change in (copy.copy, wrong_rules.commits_wrong_rows, wrong_rules.leaks_siblings):
        target = toy_model(vocab=4)
        target.probe()  # on the sound model: the probe would find the mistake by itself
        drafter = TableDrafter(shape, "without", 4)
        found = engine_distribution(change(target), drafter, [3, 1, 2], 4, ONE, verify, shape)
        assert (found.error > 1e-9) == (change is not copy.copy), change


class SharedNumber(Rng):
    """Draws a draft token with the very number that will test it."""

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return inverse_cdf(weights, self.uniform(rows, node, ACCEPT))


@pytest.mark.parametrize("rng", [Rng, SharedNumber])
def test_no_random_number_serves_twice(rng: type[Rng]) -> None:
    """Decoding plainly, with a drawn chain and with a drawn tree."""
    shape, twice = TreeShape.of([(0,), (1,), (0, 0)]), 0
    chain = DraftModel(toy_model(seed=5, layers=1), 2)
    drafters: list[Any] = [NoDraft(), chain, TableDrafter(shape, "without", 8)]
    for drafter in drafters:
        heard: list[float] = []

        class Recorder(rng):  # type: ignore[misc,valid-type]
            def uniform(
                self, rows: Tensor, node: Tensor, purpose: int, heard: list = heard
            ) -> Tensor:
                u = super().uniform(rows, node, purpose)
                heard += u.flatten().tolist()
                return u

        requested = [Request([3, 1, 4], 12, id=i) for i in range(3)]
        generate(toy_model(), drafter, requested, ONE, batch_size=2, eos_ids=(), coins=Recorder)
        twice += len(heard) - len(set(heard))
    assert (twice > 0) == (rng is SharedNumber)


class LooseTest(Rng):
    """u <= probability: accepts a token of probability 0 when u = 0."""

    def accept(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self.uniform(rows, node, ACCEPT) <= probability

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return (self.uniform(rows, node, ACCEPT) <= probability).to(torch.uint8).argmax(1)


@pytest.mark.parametrize("rng", [Rng, LooseTest])
def test_no_token_of_probability_zero_is_emitted_where_every_number_is_zero(
    rng: type[Rng],
) -> None:
    class Zero(rng):  # type: ignore[misc,valid-type]
        def uniform(self, rows: Tensor, node: Tensor, purpose: int) -> Tensor:
            return torch.zeros(node.shape, dtype=torch.float64)

    # the draft's distribution; the target's has the other half
    half = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64)
    logits = torch.tensor([-torch.inf, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    tokens = torch.tensor([[0, 1]])
    proposal = Proposal(half.expand(1, 1, 4), torch.zeros_like(tokens))
    drawn = torch.ones(1, 2, dtype=torch.bool)
    tree = DraftTree.static(TreeShape.chain(2), tokens, None, drawn, proposal)
    none = torch.zeros(1, dtype=torch.int64)
    distribution = Distribution(ONE, logits.expand(1, 3, 4), tree)
    verdict = verify(tree, distribution, Zero(0, none, none))
    wrong = int(verdict.length.sum()) + int((verdict.bonus < 2).sum())
    assert (wrong > 0) == (rng is LooseTest)
