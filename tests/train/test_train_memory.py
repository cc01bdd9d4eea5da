"""Memory of a training step: at most one [chunk, V] block in float32."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.heads.losses import LossWeights
from outrider.heads.registry import head_class
from tests.helpers.training import random_batch, tiny_target

ROOT = Path(__file__).resolve().parents[2]
CHUNK, VOCAB = 64, 1000


class Blocks(TorchDispatchMode):
    """Counts storages of at least `size` elements of a dtype that are alive at the same time."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype
        self.alive: dict[int, Any] = {}
        self.most, self.largest, self.by = 0, 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype == self.dtype and t.numel() >= self.size:
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = weakref.finalize(storage, self.alive.pop, key, None)
                if len(self.alive) > self.most:
                    self.most, self.by = len(self.alive), str(func)
                self.largest = max(self.largest, t.numel())
        return out


LOSSES = [{"soft": 1.0}, {"hard": 1.0}, {"lk": 1.0}, {"soft": 0.5, "tv": 0.5, "hard": 0.1}]


def blocks(loss: dict[str, float], dtype: torch.dtype, again: bool = False) -> Blocks:
    """The vocabulary blocks of a dtype in one EAGLE-3 pass in bfloat16, forward and backward.
    again: with activation checkpointing."""
    target = tiny_target("bfloat16", layers=4, vocab=VOCAB)
    kind: Any = head_class("eagle3")
    cfg = kind.Config(
        kind="eagle3",
        draft_vocab=0,
        chunk=CHUNK,
        loss=LossWeights(**{"hard": 0.0, **loss}),
        activation_checkpointing=again,
    )
    head = kind.for_target(target, cfg)
    batch = random_batch(rows=8, width=80, vocab=VOCAB)
    block = CHUNK * VOCAB  # larger than any weight here, and than [B, T, D]
    assert (
        block > max(p.numel() for p in head.parameters()) and int(batch.loss_mask.sum()) > 3 * CHUNK
    )
    with Blocks(block, dtype) as seen:
        head(batch, target).sum.backward()
    return seen


@pytest.mark.parametrize("loss", LOSSES)
def test_eagle3_holds_at_most_one_vocabulary_block_in_float32(loss: dict[str, float]) -> None:
    seen = blocks(loss, torch.float32)
    assert seen.most <= 1 and seen.largest <= CHUNK * VOCAB, (seen.most, seen.by, seen.largest)
