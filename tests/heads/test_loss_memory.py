"""Memory of a training step: at most one [chunk, V] block in float32."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.heads.losses import LossWeights
from outrider.heads.registry import head_class
from tests.helpers.training import random_batch, tiny_target

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


def test_eagle3_holds_at_most_one_vocabulary_block_in_float32() -> None:
    """In a pass in bfloat16, forward and backward, with every kind of loss."""
    target = tiny_target("bfloat16", layers=4, vocab=VOCAB)
    kind: Any = head_class("eagle3")
    loss = LossWeights(soft=0.5, tv=0.5, hard=0.1, lk=0.1)
    cfg = kind.Config(kind="eagle3", draft_vocab=0, chunk=CHUNK, loss=loss)
    head = kind.for_target(target, cfg)
    batch = random_batch(rows=8, width=80, vocab=VOCAB)
    block = CHUNK * VOCAB  # larger than any weight here, and than [B, T, D]
    assert (
        block > max(p.numel() for p in head.parameters()) and int(batch.loss_mask.sum()) > 3 * CHUNK
    )
    with Blocks(block, torch.float32) as seen:
        head(batch, target).sum.backward()
    assert seen.most <= 1 and seen.largest <= CHUNK * VOCAB, (seen.most, seen.by, seen.largest)
