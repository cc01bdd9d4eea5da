"""The acceptance monitor: warns once, falls back and comes back, judges every row by itself,
keeps the distribution exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.ngram import NGram
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree
from outrider.decode.wrapped import Alert, Monitor
from outrider.scripts.proofs.engine_distribution import (
    PaddingAwareDrafter,
    engine_distribution,
    toy_model,
)

REQUESTED = [Request([5 + i, 6, 7, 5 + i, 6], 26, id=i) for i in range(3)]


def test_a_bad_drafter_is_message_once_and_rests(target: Target, other: Target) -> None:
    heard: list[Alert] = []
    bad = Monitor(
        DraftModel(other, 2), 1.8, fallback=True, patience=4, retry=6, on_alert=heard.append
    )
    run = generate(target, bad, REQUESTED, Sampling(), batch_size=2, eos_ids=[])
    assert [a.request for a in heard] == [0, 1, 2] and heard == bad.alerts, "once per request"
    assert "below the 1.80" in str(heard[0]) and heard[0].accepted_length < 1.8
    for out in run.generations:
        drafted = [c.proposed > 0 for c in out.cycles]
        assert drafted[:4] == [True] * 4 and drafted[4:10] == [False] * 6, "patience, then rest"
        assert all(drafted[10:14]), "a second chance"


def test_a_good_drafter_is_left_alone(target: Target) -> None:
    good = Monitor(DraftModel(target, 4), 2.0, fallback=True, patience=3)
    run = generate(target, good, REQUESTED, Sampling(), eos_ids=[])
    assert not good.alerts and sum(len(g.cycles) for g in run.generations) <= 3 * 6


def test_without_fallback_it_only_warns(target: Target, other: Target) -> None:
    watch = Monitor(DraftModel(other, 1), 2.0, patience=3)
    run = generate(target, watch, REQUESTED, Sampling(), eos_ids=[])
    assert len(watch.alerts) == 3
    assert all(c.proposed > 0 for g in run.generations for c in g.cycles if not c.cut)


def test_rows_are_judged_alone_and_greedy_tokens_stay(target: Target, other: Target) -> None:
    plain = [
        g.token_ids
        for g in generate(
            target, NoDraft(), REQUESTED, Sampling(), batch_size=3, eos_ids=[]
        ).generations
    ]
    for inner in (NGram(), DraftModel(other, 2)):
        proposed = []
        for batch in (1, 3):
            watch = Monitor(inner, 1.5, fallback=True, patience=3, retry=5)
            run = generate(target, watch, REQUESTED, Sampling(), batch_size=batch, eos_ids=[])
            assert [g.token_ids for g in run.generations] == plain
            proposed.append([[c.proposed for c in g.cycles] for g in run.generations])
        assert proposed[0] == proposed[1]


def test_cycles_without_a_draft_are_no_evidence(target: Target) -> None:
    class Silent(NGram):
        def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
            return DraftTree.empty(len(self.texts))

    watch = Monitor(Silent(), 1.5, fallback=True, patience=1)
    generate(target, watch, REQUESTED[:1], Sampling(), eos_ids=[])
    assert not watch.alerts


class Anticipating(Monitor):
    """Drops a draft whose own first token it finds unlikely: looks at what it is about to have
    verified.
    """

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = self.inner.propose(budget, sampling, rng)
        if tree.proposal is None or not tree.width:
            return tree
        q = tree.proposal.probs[:, 0].gather(1, tree.tokens[:, :1])[:, 0]
        return DraftTree(
            tree.tokens,
            tree.parents,
            torch.where(q < 0.4, 0, tree.size),
            tree.sampled,
            tree.proposal,
            tree.static_layout,
        )


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_the_distribution_is_exact_and_an_anticipating_monitor_is_caught(rule: str) -> None:
    """Four tokens, patience 1: some branches fall back after their first cycle, others go on
    drafting.
    """
    seen: set[tuple[bool, bool]] = set()

    class Watched(Monitor):
        def propose(self, *args: Any) -> DraftTree:
            tree = super().propose(*args)
            seen.update(zip((self.rest != 0).tolist(), self.drafted.tolist(), strict=True))
            return tree

    def error(kind: type[Monitor]) -> float:
        # Counted below the monitor: which draws are padding follows from the budget that the
        # monitor lets through.
        draft = PaddingAwareDrafter(DraftModel(toy_model(vocab=3, seed=5, layers=1), 2), None)
        drafter = kind(draft, 1.5, fallback=True, patience=1, retry=1)
        return engine_distribution(
            toy_model(vocab=3), drafter, [1, 2], 4, Sampling(1.0), rule
        ).error

    assert error(Watched) <= 1e-9
    assert {(True, False), (False, True)} <= seen, "it never fell back, or never drafted"
    assert error(Anticipating) > 1e-3


def test_nonsense_is_refused() -> None:
    for bad in (
        {"break_even": 0.5},
        {"break_even": float("nan")},
        {"break_even": 1.5, "patience": 0},
    ):
        with pytest.raises(ValueError):
            Monitor(NGram(), **bad)
