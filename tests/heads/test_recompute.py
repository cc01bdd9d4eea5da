"""Activation checkpointing: bit for bit the same loss and gradients, from less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads.batch import Batch, LossOut
from outrider.heads.registry import head_class
from tests.helpers.training import random_batch, tiny_target

SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2}


VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3-deep": {"steps": 3, "layers": 2},
    "dspark": {"layers": 2, "block": 4, "markov_rank": 4, "confidence": 1.0},
    "eagle1": {"steps": 1, "noise": 0.2, "feature_loss": 1.0},
}


def trained(name: str, batch: Batch, on: bool, dtype: str) -> tuple[LossOut, list[Tensor]]:
    """Loss and gradients of one pass."""
    target = tiny_target("float32" if dtype == "float64" else dtype, **SHAPE)
    kind: Any = head_class(name.partition("-")[0])
    torch.manual_seed(0)
    keys = {"kind": kind.kind, "draft_vocab": 0, "chunk": 8, **VARIANTS[name]}
    if dtype == "float64":
        target.model.double()
    head = kind.for_target(target, kind.Config(**keys, activation_checkpointing=on)).train()
    head = head.double() if dtype == "float64" else head
    torch.manual_seed(1)
    out = head(batch, target)
    out.sum.backward()
    return out, [p.grad for p in head.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_losses_and_gradients_are_bitwise_equal(name: str) -> None:
    rows = random_batch(3, 15)
    for dtype in ("float64", "bfloat16"):
        plain, grads = trained(name, rows, False, dtype)
        again, same = trained(name, rows, True, dtype)
        assert torch.equal(plain.sum, again.sum) and float(plain.count) == float(again.count) > 0
        assert len(grads) == len(same) > 0 and all(
            torch.equal(a, b) for a, b in zip(grads, same, strict=True)
        )
        assert all(torch.equal(plain.stats[k], again.stats[k]) for k in plain.stats)
