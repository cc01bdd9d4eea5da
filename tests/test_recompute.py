"""Activation checkpointing: bit for bit the same loss and gradients, from less memory."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads import HEADS
from heads.base import Batch
from tests.training import random_batch, tiny_target

SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2}


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that were made under it and are alive. most: the largest number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.most = max(self.most, self.bytes)
        return out


VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 4}, "eagle3-deep": {"steps": 3, "layers": 2}, "eagle3-own": {"steps": 3, "layer": "target"},
    "eagle1": {"steps": 1, "noise": 0.2, "feature_loss": 1.0}, "eagle1-hass": {"steps": 3, "top_k": 5},
}


def packed() -> Batch:
    """Three documents in two rows."""
    batch = random_batch(2, 14)
    position = torch.arange(14).repeat(2, 1)
    position[0, 6:] -= 6
    return dataclasses.replace(batch, position=position, sample_ids=torch.arange(3))


@pytest.mark.parametrize("batch", [random_batch(3, 15), packed()], ids=["padded", "packed"])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_losses_and_gradients_are_bitwise_equal(name: str, batch: Batch) -> None:
    target = tiny_target(**SHAPE)
    target.model.double()
    kind: Any = HEADS[name.partition("-")[0]]
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        cfg = kind.Config(kind=kind.kind, draft_vocab=0, chunk=8, activation_checkpointing=on, **VARIANTS[name])
        head = kind.for_target(target, cfg).double().train()
        before = torch.get_rng_state()
        with Alive() as seen:
            out = head(batch, target)
            held = seen.bytes
        out.sum.backward()
        assert torch.equal(before, torch.get_rng_state())
        found.append((out, [p.grad for p in head.parameters()], held))
    (plain, grads, much), (again, same, little) = found
    assert torch.equal(plain.sum, again.sum) and float(plain.count) == float(again.count) > 0
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))
    assert all(torch.equal(plain.stats[k], again.stats[k]) for k in plain.stats)
    assert little < much


def test_memory_grows_by_what_goes_from_step_to_step_alone() -> None:
    """A step more costs a feature, keys and values instead of the inside of a layer; also at the peak of the backward
    pass, which holds one step's inside."""
    target = tiny_target(**SHAPE)
    kind: Any = HEADS["eagle3"]
    batch = random_batch(4, 64)
    grown = {}
    for on in (False, True):
        held, most = [], []
        for steps in (3, 7):
            head = kind.for_target(target, kind.Config(kind="eagle3", draft_vocab=0, steps=steps, chunk=16,
                                                       activation_checkpointing=on))
            with Alive() as seen:
                out = head(batch, target)
                held.append(seen.bytes)
                out.sum.backward()
            most.append(seen.most)
        grown[on] = (held[1] - held[0], most[1] - most[0])
    print(grown)
    assert grown[True][0] < 0.4 * grown[False][0] and grown[True][1] < 0.5 * grown[False][1], grown
