"""Leans towards the drafter's distribution: draws from the distribution that is owed have
none whatever the drafter is, a few tokens from the drafter's show."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.decode.sampling import Sampling
from outrider.heads import load_head, save_head
from outrider.heads.base import Batch
from outrider.scripts.proofs.served import Lean, SampledAnswer
from outrider.scripts.serving.drafter_distributions import drafter_distributions
from tests.helpers.interop import deep_target, random_head

R, V = 6000, 40


@pytest.fixture(scope="module")
def target():
    return deep_target()


def drawn(share: float, seed: int) -> Lean:
    """R tokens from (1 - share) p + share q, judged with q and with another distribution."""
    generator = torch.Generator().manual_seed(seed)
    p, q, other = (torch.randn(R, V, generator=generator).softmax(-1) for _ in range(3))
    mixed = (1 - share) * p + share * q
    tokens = torch.multinomial(mixed, 1, generator=generator)[:, 0]
    lean = Lean(("all tokens", "half"))
    groups = np.stack([np.ones(R, dtype=bool), np.arange(R) % 2 == 0], 1)
    for rows in (slice(0, R // 3), slice(R // 3, R)):
        lean.add(p[rows], [q[rows], other[rows]], tokens[rows], groups[rows])
    return lean


def test_draws_from_the_distribution_do_not_lean() -> None:
    ps = [t.p for seed in range(8) for t in drawn(0.0, seed).tests()]
    assert len(ps) == 32 and min(ps) > 1e-4


def test_a_few_draws_from_the_drafter_are_seen() -> None:
    found = {t.name: t for t in drawn(0.1, 0).tests() if t.stratum == "all tokens"}
    own, other = (found[name] for name in Lean.NAMES)
    assert own.p < 1e-6 and own.statistic > other.statistic > 0


def test_a_drafter_without_distributions_says_nothing() -> None:
    lean = Lean(("all tokens",))
    p = torch.full((10, V), 1 / V)
    zero = torch.zeros_like(p)
    lean.add(p, [zero, zero], torch.arange(10), np.ones((10, 1), dtype=bool))
    assert lean.tests() == [] and lean.count[0] == 10


@pytest.mark.parametrize(
    "kind, keys", [("eagle3", {"draft_vocab": 64}), ("eagle3", {"draft_vocab": 0}), ("medusa", {})]
)
def test_a_heads_distribution_stands_at_its_place(target, tmp_path, kind: str, keys: dict) -> None:
    head = random_head(target, kind, **keys)
    save_head(head, tmp_path / "head", target.identity, {})
    answer = SampledAnswer(0, 0, 1, [5, 77, 200, 31], [9, 8, 7, 6])
    distributions = drafter_distributions(str(tmp_path), target, Sampling(0.7))(answer)
    assert distributions.shape == (4, target.vocab_size)
    sums = distributions.sum(-1)
    assert bool(((sums - 1).abs() < 1e-5).logical_or(sums == 0).all()) and bool(sums.any())
    ids = torch.tensor([[*answer.prompt, *answer.tokens]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, mask, mask, torch.zeros(1, dtype=torch.int64))
    loaded = load_head(tmp_path / "head", target)
    known = loaded.ids()
    for flat, level, logits in loaded.forced(batch, target, 1):
        for place, row in zip(flat.tolist(), logits.float(), strict=True):
            if level == 0 and place >= 4:
                best = int(row.argmax())
                wanted = best if known is None else int(known[best])
                assert int(distributions[place - 4].argmax()) == wanted
                assert math.isclose(
                    float(distributions[place - 4, wanted]),
                    float((row / 0.7).softmax(-1).max()),
                    abs_tol=1e-5,
                )
