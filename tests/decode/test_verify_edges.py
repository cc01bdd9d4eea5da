"""Where distributions leave the range of their dtype, hold NaN, or are not what they claim:
exact, or refused in words.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.checks import validate
from outrider.decode.grow import siblings
from outrider.decode.rng import Rng, inverse_cdf
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import Verdict, traversal


@pytest.mark.parametrize("row, below", [(99, 0.2), (1, math.nan)])
def test_distribution_row_of_a_deterministic_node_is_never_read(row: int, below: float) -> None:
    """One sampled child of the root, and below it two deterministic ones whose distribution
    row means nothing: the verdicts are those beside a row that is one."""
    shape, count = TreeShape.of([(0,), (0, 0), (0, 1)]), 200
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, 3, generator=generator, dtype=torch.float64).expand(count, -1, -1)
    rows = torch.arange(count)

    def verdict(row: int, below: float) -> Verdict:
        distributions = torch.tensor([[0.7, 0.2, 0.1], [below] * 3]).expand(count, -1, -1)
        proposal = Proposal(distributions, torch.tensor([[0, row, row]]).expand(count, -1))
        drawn = torch.tensor([[True, False, False]]).expand(count, -1)
        tokens = torch.tensor([[0, 1, 2]]).expand(count, -1)
        tree = DraftTree.static(shape, tokens, None, drawn, proposal)
        validate(tree, 3)
        found = Distribution(Sampling(1.0), logits, tree)
        given = traversal(tree, found, Rng(0, rows, torch.zeros_like(rows)))
        found.check()
        return given

    found, wanted = verdict(row, below), verdict(0, 0.2)
    assert torch.equal(found.path, wanted.path) and torch.equal(found.bonus, wanted.bonus)
    assert found.length.unique().tolist() == [1, 2]


@pytest.mark.parametrize(
    "temperature, dtype",
    [(1e-30, torch.float32), (0.01, torch.bfloat16), (1e30, torch.float16)],
)
def test_distribution_is_finite_at_every_temperature(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[60000.0, -60000.0, 59000.0, -math.inf]], dtype=dtype)
    for settings in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
        distribution = Sampling(temperature, **settings).support(logits).dense(4)
        assert distribution.isfinite().all() and float(distribution[0, 3]) == 0
        assert float(distribution.sum()) == pytest.approx(1, abs=1e-6)


def scan(values: Tensor, dim: int) -> Tensor:
    """Running sums as an accelerator adds them (Hillis and Steele 1986): those of neighbours round
    apart, so that they may fall, or grow where nothing is added."""
    assert dim == -1
    sums, step = values.clone(), 1
    while step < sums.shape[-1]:
        more = sums[..., :-step].clone()
        sums[..., step:] += more
        step *= 2
    return sums


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("size", [40, 2048])
def test_no_token_of_weight_zero_is_emitted_however_sums_round(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "cumsum", scan)
    g = torch.Generator().manual_seed(0)
    weights = (6 * torch.randn(50, size, generator=g, dtype=torch.float64)).softmax(-1)
    weights = torch.where(torch.rand(50, size, generator=g) < 0.5, 0.0, weights)
    sums, every = weights.cumsum(-1), torch.arange(50)
    rng, seen = Rng(0, every, torch.zeros_like(every)), 0
    for _ in range(100):
        place = torch.randint(size, (50, 1), generator=g)
        edge = (sums.gather(1, place) / sums[:, -1:])[:, 0].clamp(max=1 - 2.0**-53)
        monkeypatch.setattr(rng, "uniform", lambda rows, node, purpose, edge=edge: edge)
        chosen = rng.draw(weights, every, every)
        assert (weights.gather(1, chosen[:, None]) > 0).all()
        seen += int((weights.gather(1, inverse_cdf(weights, edge)[:, None]) == 0).sum())
    assert seen, "no sum grew where nothing was added: the test saw nothing"


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("size", [2, 1])
def test_logits_that_no_path_reaches_may_be_anything(size: int) -> None:
    """Below a candidate that the target never takes nothing is looked at, whether the draft goes on
    there or its budget ends."""
    distribution = torch.full((1, 2, 4), 0.25, dtype=torch.float64)
    row, drawn = torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    proposal = Proposal(distribution, row)
    tree = DraftTree.chain(torch.tensor([[1, 2]]), torch.tensor([size]), drawn, proposal)
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 1] = -torch.inf
    logits[0, 1] = torch.nan
    found = Distribution(Sampling(1.0), logits, tree)
    verdict = traversal(tree, found, Rng(0, torch.tensor([0]), torch.tensor([0])))
    found.check()
    assert verdict.length.tolist() == [0] and verdict.bonus.tolist() != [1]


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}], ids=str)
def test_a_tree_drawn_from_nan_is_refused_under_every_setting(settings: dict[str, float]) -> None:
    """A truncated distribution of NaN holds it at a few tokens alone: what is drawn beside
    them has no mass, and once passed for a stand-in."""
    logits = -torch.arange(600.0).repeat(2, 1, 1)
    logits[1, 0, 3] = torch.nan
    distribution = Sampling(1.0, **settings).draft_probs(logits[:, 0])[:, None]  # type: ignore[arg-type]
    rng = Rng(0, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    _, place, fresh = siblings(distribution, logits, [[0, 1]], rng)
    proposal = Proposal(distribution, torch.zeros(2, 2, dtype=torch.int64))
    tree = DraftTree.static(TreeShape.of([(0,), (1,)]), place, None, fresh, proposal)
    with pytest.raises(UserError, match="row 1, node 0: the distribution .* NaN or infinity"):
        validate(tree, 600)
