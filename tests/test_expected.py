"""Expected accepted length: what enumeration of every coin gives, on the same drafts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_verify import random_world

from decode.rng import Rng
from decode.sampling import Law
from decode.tree import DraftTree
from decode.verify import RULES, walk
from scripts.proofs import expected

SHAPES = [[[0], [0, 0], [0, 0, 0]], [[0], [1], [0, 0], [0, 1], [1, 0]], [[0], [1], [2]]]


def tile(tree: DraftTree, times: int) -> DraftTree:
    """The rows of a tree again and again."""
    assert tree.proposal is not None and tree.sampled is not None
    law, row = tree.proposal.law.repeat(times, 1, 1), tree.proposal.row.repeat(times, 1)
    proposal = dataclasses.replace(tree.proposal, law=law, row=row)
    repeated = (
        x.repeat(times, *[1] * (x.dim() - 1))
        for x in (tree.tokens, tree.parents, tree.size, tree.sampled)
    )
    return DraftTree(*repeated, proposal, tree.static_layout)


@pytest.mark.parametrize("sampled", ["all", "some", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_expected_length_is_the_mean_over_coins(rule: str, sampled: str) -> None:
    for seed, paths in enumerate(SHAPES):
        tree, law = random_world(seed, 3, paths, 4, sampled)
        wanted = expected.accepted(tree, law, rule)
        many = tile(tree, 400)
        logits = law.logits.repeat(400, 1, 1)
        rng = Rng(seed, torch.arange(1200), torch.ones(1200, dtype=torch.int64))
        lengths = (
            RULES[rule](many, Law(law.sampling, logits, many), rng).length.double().view(400, 3)
        )
        spread = 4 * tree.layout.levels / 2 / 400**0.5
        assert ((lengths.mean(0) - wanted).abs() < spread).all(), (seed, lengths.mean(0), wanted)


def test_deterministic_drafts_gain_nothing() -> None:
    tree, law = random_world(1, 4, SHAPES[1], 4, "none")
    plain = type(tree)(tree.tokens, tree.parents, tree.size, None, None, tree.static_layout)
    down = expected.accepted(plain, law, "rejection")
    assert torch.allclose(down, expected.accepted(tree, law, "traversal"), atol=1e-12)
    assert torch.allclose(down, expected.accepted(tree, law, "rejection"), atol=1e-12)


def test_watched_notes_full_drafts_by_request() -> None:
    tree, law = random_world(0, 3, SHAPES[0], 4, "none")
    tree = type(tree)(
        tree.tokens, tree.parents, torch.tensor([3, 1, 3]), None, None, tree.static_layout
    )
    rule = expected.Watched(walk, 3, False)
    rule(tree, law, Rng(0, torch.tensor([7, 8, 9]), torch.zeros(3, dtype=torch.int64)))
    assert sorted(rule.seen) == [7, 9] and len(rule.seen[7][0]) == 3
