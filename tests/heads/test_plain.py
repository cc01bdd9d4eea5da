"""An ordinary model folder as a drafter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode.checks import validate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.drafters import resolve_drafter
from tests.helpers.training import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A relative of the target: its weights with noise."""
    draft, place = copy.deepcopy(target.model), tmp_path_factory.mktemp("plain") / "small"
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():
        weight.data += 0.03 * torch.randn(weight.shape, generator=generator)
    draft.save_pretrained(place)
    target.tokenizer.save_pretrained(place)
    return place


def draft_of(drafter: Any, temperature: float) -> Any:
    """What it proposes after three tokens."""
    sampling = Sampling(temperature)
    drafter.reset(1, 32)
    drafter.begin([torch.tensor([5, 6])], sampling)
    drafter.observe(torch.tensor([[6, 7]]), None, torch.tensor([2]), slice(0, 1))
    zero = torch.zeros(1, dtype=torch.int64)
    return drafter.propose(torch.tensor([9]), sampling, Rng(0, zero, zero))


def test_its_tree_is_drawn_as_that_of_a_head(folder: Path, target: Target) -> None:
    for spec in (f"{folder}", f"{folder}@tree"):
        drafter = resolve_drafter(spec, target)
        tree = draft_of(drafter, 1.0)
        assert (
            drafter.name == spec and drafter.shape == "tree" and tree.width > drafter.max_depth == 5
        ), spec
        assert tree.sampled is not None and bool(tree.sampled.all()), spec
        validate(tree, target.vocab_size, drafter.max_nodes)
    assert draft_of(resolve_drafter(str(folder), target), 0.0).sampled is None
    deepest = draft_of(resolve_drafter(str(folder), target), 1.0)
    assert int(deepest.layout.depth.max()) == 4, "the chain of five is part of the tree"


def test_a_tree_has_as_many_nodes_as_are_requested_for(folder: Path, target: Target) -> None:
    """Also more than its own width and the 64 of a measured tree hold."""
    nodes = 256
    drafter = resolve_drafter(f"{folder}@tree:{nodes}", target)
    for temperature in (0.0, 1.0):
        assert draft_of(drafter, temperature).width == drafter.max_nodes == nodes
