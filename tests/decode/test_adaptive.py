"""Adaptive draft length: follows acceptance and stays exact."""

from __future__ import annotations

from typing import Any

from outrider.decode.adaptive import Adaptive
from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from tests.helpers.engine_distribution import (
    PaddingAwareDrafter,
    TableDrafter,
    engine_distribution,
    toy_model,
)

REQUESTED = [Request([5 + i, 6, 7, 5 + i, 6], 48, id=i) for i in range(5)]


def test_depth_rises_with_acceptance_and_falls_without(target: Target, other: Target) -> None:
    def whole(draft: Target) -> list[int]:
        drafter = Adaptive(DraftModel(draft, 8))
        run = generate(target, drafter, REQUESTED, Sampling(), eos_ids=[])
        return [c.proposed for g in run.generations for c in g.cycles[5:] if not c.cut]

    assert not (good := whole(target)) or max(good) > 4
    late = whole(other)
    assert sum(late) < 2 * len(late)  # an unrelated model is hardly ever right


def test_the_distribution_is_exact() -> None:
    """Long enough for the depth to fall after a rejection in the first cycle."""
    chain = TreeShape.chain(2)
    depths: set[int] = set()

    class Watched(Adaptive):
        def propose(self, *args: Any) -> DraftTree:
            tree = super().propose(*args)
            depths.update(self.depths().tolist())
            return tree

    def error(wrap: Any) -> float:
        drafter = wrap(PaddingAwareDrafter(TableDrafter(chain, "iid", 3), chain))
        return engine_distribution(
            toy_model(vocab=3), drafter, [1, 2], 5, Sampling(1.0), shape=chain
        ).error

    assert error(lambda d: Watched(d, cost=0.27)) <= 1e-9
    assert depths == {1, 2}, "the depth never moved: the test saw a constant rule"
