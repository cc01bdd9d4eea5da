"""The sampling setting against transformers' own warpers, a naive reading, and addressed random
numbers.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.decode.rng import ACCEPT, DRAFT, RESIDUAL, Rng, inverse_cdf
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree
from outrider.scripts.certificate.enumerator import naive_distribution


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 9999),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 300]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_distribution_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = (
        torch.randn(3, 1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    )
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.zeros(3, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    ours = Sampling(temperature, top_k, top_p, min_p).support(logits).dense(1000)
    assert torch.allclose(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "s",
    [
        Sampling(1.0, min_p=0.01),
        Sampling(0.8, top_k=600, top_p=0.99),
    ],
)
def test_wide_supports_and_ties_fall_back_to_all_candidates(s: Sampling) -> None:
    """Flat distributions (support in the thousands) and bfloat16 logits (ties at the edge) give the
    documented distribution.
    """
    g = torch.Generator().manual_seed(1)
    for logits in (
        torch.randn(2, 6000, generator=g) * 0.1,
        (torch.randn(2, 6000, generator=g) * 4).bfloat16().float(),
        torch.zeros(2, 6000),
    ):
        ours = s.support(logits.double()).dense(6000)
        theirs = torch.stack([naive_distribution(row.double(), s) for row in logits])
        assert torch.allclose(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("s, tail", [(Sampling(0.7), 5e-2), (Sampling(1.0, min_p=1e-12), 0.5)])
def test_a_large_vocabulary_keeps_its_mass_in_float32(s: Sampling, tail: float) -> None:
    """One likely token and a flat tail, as a separate small model of Qwen's drafts it: torch's own
    softmax comes to between 0.999 and 1.001, and `DraftTree.validate` refuses that."""
    logits = torch.full((2, 151_936), s.temperature * math.log(tail / 151_936))
    logits[:, 5] = 0.0
    exact = (logits.double() / s.temperature).softmax(-1)
    for probs in (s.support(logits).dense(151_936), s.draft_probs(logits)):
        assert (probs.double().sum(-1) - 1).abs().max() < 2e-6
        assert torch.allclose(probs.double(), exact, atol=0, rtol=1e-5)


def test_greedy_is_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, 9)
    logits[0, [3, 6]] = 1.0
    assert Sampling(0.0).support(logits).dense(9).argmax(-1).tolist() == [3]


def test_history_follows_the_path_of_each_node() -> None:
    """The repetition penalty sees prompt, committed tokens and the node's own ancestors."""
    g = torch.Generator().manual_seed(0)
    tree = DraftTree(
        torch.tensor([[4, 5, 6], [7, 8, 9]]),
        torch.tensor([[-1, -1, 0], [-1, 0, 1]]),
        torch.tensor([3, 3]),
    )
    logits = torch.randn(2, 4, 12, generator=g, dtype=torch.float64)
    history = [[1, 2, 3], [2, 10]]
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    distribution = Distribution(Sampling(1.0, repetition_penalty=1.7), logits, tree, history)
    for b, paths in enumerate([[[], [4], [5], [4, 6]], [[], [7], [7, 8], [7, 8, 9]]]):
        for slot, path in enumerate(paths):
            ids = torch.tensor([history[b] + path])
            want = penalty(ids, logits[b : b + 1, slot].clone()).softmax(-1)
            got = distribution.at(torch.tensor([b]), torch.tensor([slot])).dense(12)
            assert torch.allclose(got, want, atol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([1, 2, 300, 1024, 1300, 2048, 4096]))
def test_inverse_cdf_is_the_definition(seed: int, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(16, size, generator=g) * (torch.rand(16, size, generator=g) < 0.3)
    weights[:, seed % size] = 0.5
    u = torch.rand(16, generator=g, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2.0**-53
    got = inverse_cdf(weights, u)
    assert (weights.gather(1, got[:, None]) > 0).all(), "a token of weight 0 was drawn"
    total = weights.double().cumsum(1)
    goal = u * total[:, -1]
    above = total.gather(1, got[:, None])[:, 0]
    assert (above >= goal - 1e-9).all() and (
        above - weights.double().gather(1, got[:, None])[:, 0] <= goal + 1e-9
    ).all()


def test_addressed_numbers() -> None:
    """Uniform, and different for every part of the address; the same wherever the row stands."""
    requests, cycles = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    rows, node = torch.arange(200), torch.arange(50).expand(200, 50)
    u = Rng(7, requests, cycles).uniform(rows, node, ACCEPT)
    others = [
        Rng(8, requests, cycles).uniform(rows, node, ACCEPT),
        Rng(7, requests, cycles + 1).uniform(rows, node, ACCEPT),
        Rng(7, requests, cycles).uniform(rows, node, DRAFT),
        Rng(7, requests, cycles).uniform(rows, node, RESIDUAL),
        Rng(7, requests + 1000, cycles).uniform(rows, node, ACCEPT),
        Rng(7, requests, cycles).uniform(rows, node + 50, ACCEPT),
    ]
    for other in others:
        assert not (u == other).any()
        assert abs(float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])) < 0.05
    assert u.dtype == torch.float64 and bool(((u >= 0) & (u < 1)).all())
    counts = torch.histc(u.flatten(), 20, 0, 1)
    assert (
        float(((counts - 500) ** 2 / 500).sum()) < 45
    )  # chi-square, 19 degrees of freedom, p about 1e-3
    moved = Rng(7, requests.flip(0), cycles).uniform(rows, node, ACCEPT)
    assert torch.equal(moved.flip(0), u)
    assert not torch.equal(
        Rng(-1, requests, cycles).uniform(rows, node, DRAFT), u
    )  # any int is a seed
