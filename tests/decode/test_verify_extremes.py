"""The exact distribution of one verification at the edges of floating point: every branch of
draft and verification walked.

Distributions that hold zeros and denormals, are one-hot or off one by rounding; drafts that
are certain and wrong down to depth four; T from 0.01 to 5, the target's logits up to 300
temperatures apart and stored in 64, 32 or 16 bits.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider.decode.sampling import Sampling
from outrider.decode.tree import TreeShape
from outrider.decode.verify import verify
from outrider.scripts.certificate.enumerator import enumerate_case
from tests.helpers.extremes import TEMPERATURES, Extreme

# What a distribution may be off by, after three or four levels. float64 adds up to 1e-15. In
# float32 the target's softmax, its quotient by T and the draft distribution each round by
# 6e-8 of a probability, eight tokens or levels at most: 1e-6.
BARS = {torch.float64: 1e-12, torch.float32: 1e-6}
# (logits, draft distributions); logits of 16 bits become a distribution in float32
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
NAMES = ["float64", "float32", "bfloat16", "float16"]


def check(world: Extreme, name: str) -> None:
    found = enumerate_case(world, verify)
    words = f"{name}: {world.scheme} {world.shape.paths} {world.draft_vocab}"
    # NaN is above it as well
    assert found.error <= BARS[world.draft.dtype], f"{words}: off by {found.error:.3g}"


def check_worlds(
    count: int, temperature: float, stored: torch.dtype, distributions: torch.dtype, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        world = Extreme.random(generator, temperature, stored, distributions)
        check(world, f"world {number} of seed {seed}")


@pytest.mark.parametrize("stored, distributions", DTYPES, ids=NAMES)
def test_exact_distribution_at_the_edges(stored: torch.dtype, distributions: torch.dtype) -> None:
    for seed, temperature in enumerate(TEMPERATURES):
        check_worlds(3, temperature, stored, distributions, seed + 40)


@pytest.mark.usefixtures("accelerator")
def test_exact_distribution_at_the_edges_of_an_accelerator() -> None:
    for stored, distributions in DTYPES[:2]:
        for seed, temperature in enumerate(TEMPERATURES):
            check_worlds(2, temperature, stored, distributions, seed + 80)


@pytest.mark.slow
@pytest.mark.parametrize("stored, distributions", DTYPES, ids=NAMES)
def test_exact_distribution_at_the_edges_often(
    stored: torch.dtype, distributions: torch.dtype
) -> None:
    for temperature in TEMPERATURES:
        check_worlds(100, temperature, stored, distributions)


@pytest.mark.parametrize(("gap", "temperature"), [(50, 1.0), (52, 0.01), (300, 0.2)])
def test_a_draft_that_is_certain_and_wrong_twice(gap: int, temperature: float) -> None:
    """The draft knows three of four tokens and is all but certain of token 0, which the target
    gives exp(-gap) twice; below it hang two siblings. Once token 0 came out with probability
    0.999996 from a gap of 52 on."""
    shape = TreeShape.of([(0,), (0, 0), (0, 0, 0), (0, 0, 1)])
    contexts = 5 ** (shape.depth + 1)
    target = torch.zeros(contexts, 4)
    draft = torch.tensor([0.4, 0.3, 0.3, 0.0]).repeat(contexts, 1)
    for context in (0, 1):  # nothing drafted yet, and token 0 drafted
        target[context, 0] = -gap * temperature
        draft[context] = torch.tensor([1 - 2e-6, 1e-6, 1e-6, 0.0])
    sampling = Sampling(temperature)
    for known, ids in ((3, torch.arange(3)), (4, None)):
        check(Extreme(4, shape, "without", sampling, target, draft[:, :known], ids), "twice wrong")


def test_a_draft_distribution_whose_remainder_is_denormal() -> None:
    """Two siblings: behind the first one only denormals are left. Once the target's
    distribution [.4 .3 .2 .1] came out as [.40 .45 .10 .05]."""
    shape = TreeShape.of([(0,), (1,)])
    target = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(25, 1)
    target -= target.amax()
    for rest, known in itertools.product((1e-30, 1e-39, 1e-45), (2, 3, 4)):
        draft = torch.tensor([1.0, rest, rest / 10, 0.0]).repeat(25, 1)[:, :known]
        ids = None if known == 4 else torch.arange(known)
        check(Extreme(4, shape, "without", Sampling(1.0), target, draft, ids), "denormal remainder")


def test_tree_of_one_hot_distributions_has_stand_ins() -> None:
    """A one-hot distribution: the second sibling is deterministic, whatever its distribution
    row says."""
    shape = TreeShape.of([(0,), (1,), (0, 0), (0, 1)])
    target = (-torch.arange(3.0).repeat(64, 1) * torch.arange(64)[:, None] / 8).double()
    draft = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64).repeat(32, 1)
    check(Extreme(3, shape, "without", Sampling(0.3), target, draft), "one-hot")
