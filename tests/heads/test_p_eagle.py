"""P-EAGLE: EAGLE-3 rows that read a mask from depth 1 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.tree import DraftTree, TreeShape
from outrider.heads.batch import Batch
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.eagle.head import Eagle3Head
from outrider.heads.interop import refusals
from outrider.heads.names import DraftSpec
from outrider.scripts.certificate.engine_distribution import engine_distribution, toy_model
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


class Watched:
    """A drafter that keeps, for every cycle, the place of the last committed token and the
    logits of all levels."""

    def __init__(self, drafter: Any) -> None:
        self.inner = drafter
        self.found: list[tuple[int, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, *args: Any) -> DraftTree:
        tree: DraftTree = self.inner.propose(*args)
        if tree.width:
            self.found.append((self.inner.lengths[0], self.inner.known[0].clone()))
        return tree


@pytest.mark.parametrize("window", [None, 6])
@torch.no_grad()
def test_every_round_of_a_decode_drafts_what_the_training_pass_has(window: int | None) -> None:
    target = tiny_target("float64", layers=4)
    head = made(target, sliding_window=window)
    drafter = Watched(head.drafter(target, DraftSpec(shape="chain")))
    run = generate(target, drafter, [Request([5, 6, 7], 40)], Sampling(1.5), eos_ids=())  # type: ignore[arg-type]
    answer = run.generations[0]
    assert len({c.accepted for c in answer.cycles if not c.cut}) > 2
    ids = torch.tensor([[5, 6, 7, *answer.token_ids]])
    on = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, on, on, torch.zeros(1, dtype=torch.int64))
    wanted = {
        (int(flat) - level - 1, level): row
        for places, level, z in head.forced(batch, target, 4)
        for flat, row in zip(places, z, strict=True)
    }
    compared = 0
    for place, known in drafter.found:
        for level, row in enumerate(known):
            if (place, level) in wanted:
                want = wanted[place, level]
                torch.testing.assert_close(row, want, rtol=0, atol=1e-9)
                compared += 1
    assert compared > 40


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


def test_what_a_parallel_head_cannot_be_is_named() -> None:
    target = tiny_target(layers=4)
    head = made(target, layers=1)
    assert any("head.mask_token" in line for line in refusals("vllm", head, target, "x"))
