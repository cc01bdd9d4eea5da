"""A test of the tests: every known wrong rule is caught by the layer it names, and the correct
code passes there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.decode.tree import DraftTree, Proposal
from outrider.scripts.proofs.controls import drafters
from outrider.scripts.proofs.controls.catalogue import Control, controls

ALL = controls()
LAYERS = {"enumeration", "engine enumeration", "scripted uniforms", "acceptance floor"}


@pytest.mark.parametrize("control", ALL, ids=lambda c: c.name)
def test_wrong_code_is_caught_where_the_correct_code_passes(control: Control) -> None:
    assert control.layer in LAYERS
    assert control.wrong() > control.limit
    assert control.right() <= min(control.limit, 1e-12)


def test_the_list_is_complete() -> None:
    names = [c.name for c in ALL]
    assert len(set(names)) == len(names) >= 16
    assert {c.layer for c in ALL} == LAYERS


def bias(p: Tensor, mangle: Callable[[DraftTree], DraftTree]) -> float:
    """Total variation of one token that was drafted from the target's own row p [V], scored
    as `mangle` says."""
    tree = DraftTree(
        torch.zeros(1, 1, dtype=torch.int64),
        torch.full((1, 1), -1),
        torch.ones(1, dtype=torch.int64),
        torch.ones(1, 1, dtype=torch.bool),
        Proposal(p[None, None], torch.zeros(1, 1, dtype=torch.int64)),
    )
    proposal = mangle(tree).proposal
    assert proposal is not None
    claimed = proposal.probs[0, 0]
    accepted = p * (p / claimed).clamp(max=1)
    residual = (p - claimed).clamp(min=0)
    written = accepted + (1 - accepted.sum()) * residual / residual.sum()
    return float((written - p).abs().sum()) / 2


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_a_draft_that_claims_too_much_stays_wrong_over_a_large_vocabulary(vocabulary: int) -> None:
    likely = torch.tensor([0.6, 0.25, 0.1], dtype=torch.float64)
    tail = torch.full((vocabulary - 3,), 0.05 / (vocabulary - 3), dtype=torch.float64)
    p = torch.cat([likely, tail])
    flatter, sharper = bias(p, drafters.scored_unwarped), bias(p, drafters.scored_sharpened)
    assert sharper > 0.1 and sharper > 2 * flatter, (flatter, sharper)
