"""P-EAGLE: EAGLE-3 rows that read a mask from depth 1 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.decode.sampling import Sampling
from outrider.decode.tree import TreeShape
from outrider.heads import parity
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.names import DraftSpec
from tests.helpers.engine_distribution import engine_distribution, toy_model
from tests.helpers.training import tiny_target

SMALL = TreeShape.of([(0,), (1,), (0, 0)])


def made(target: Any, **keys: Any) -> Any:
    """A head in float64 whose weights are no longer those of the start."""
    keys = {"layers": 2, "parallel": True, "draft_vocab": 0, "depth": 4, **keys}
    torch.manual_seed(0)
    head = Eagle3Head.for_target(target, EagleConfig(**keys)).double()
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return head.eval()


@pytest.mark.parametrize("window", [None, 6])
def test_a_sound_head_passes_the_gate(window: int | None) -> None:
    target = tiny_target("float64", layers=4)
    head = made(target, sliding_window=window)
    found = parity.check(head, target, [[5, 6, 7], [9, 8]], 40)
    assert found.passed and found.cycles > 10 and len(found.distance) == 4


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_exact_distribution_of_the_decode_loop(shape: str) -> None:
    target = toy_model(vocab=4 if shape == "tree" else 3)
    head = made(target, layers=1, taps=[0, 1, 2])
    head.calibration = {"paths": [list(p) for p in SMALL.paths]}
    requested = DraftSpec(shape=shape, depth=2, nodes=3 if shape == "tree" else None)
    static = SMALL if shape == "tree" else None
    drafter = head.drafter(target, requested)
    found = engine_distribution(
        target, drafter, [1, 2], 3 if static else 4, Sampling(1.2), shape=static
    )
    assert found.error < 1e-12 and found.branches > 100
