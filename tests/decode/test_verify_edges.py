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
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.grow import Form, siblings
from outrider.decode.rng import Rng, inverse_cdf
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import traversal
from outrider.heads.block.config import BlockConfig
from outrider.heads.eagle.config import EagleConfig
from outrider.heads.medusa.head import MedusaConfig
from outrider.heads.medusa.hydra_heads import HydraHeadsConfig
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.scripts.certificate.enumerator import Branches, Script
from tests.helpers.training import tiny_target


def output_distribution(tree: DraftTree, logits: Tensor) -> dict[tuple[int, ...], float]:
    """Probability of every output of this one draft: all branches of verification walked.
    logits: [N + 1, V].
    """
    found: dict[tuple[int, ...], float] = {}
    scripts: list[Script] = [{}]
    while scripts:
        rng, rows = Branches(scripts), len(scripts)
        assert tree.proposal is not None and tree.sampled is not None
        proposal = Proposal(
            tree.proposal.probs.expand(rows, -1, -1),
            tree.proposal.row.expand(rows, -1),
            tree.proposal.vocab,
        )
        many = DraftTree(
            tree.tokens.expand(rows, -1),
            tree.parents.expand(rows, -1),
            tree.size.expand(rows),
            tree.sampled.expand(rows, -1),
            proposal,
        )
        distribution = Distribution(Sampling(1.0), logits.expand(rows, -1, -1), many)
        verdict = traversal(many, distribution, rng)
        distribution.check()
        scripts = rng.new
        for b in range(rows):
            output = (
                *many.tokens[b, verdict.path[b][: verdict.length[b]]].tolist(),
                int(verdict.bonus[b]),
            )
            found[output] = found.get(output, 0.0) + rng.weight[b]
    return found


def drafted(
    shape: TreeShape,
    tokens: list[int],
    distributions: Tensor,
    rows: list[int],
    vocab: Tensor | None,
) -> DraftTree:
    """One tree with every node drawn from distributions[rows[node]]."""
    sampled = torch.ones(1, len(tokens), dtype=torch.bool)
    return DraftTree.static(
        shape,
        torch.tensor([tokens]),
        None,
        sampled,
        Proposal(distributions[None], torch.tensor([rows]), vocab),
    )


@pytest.mark.parametrize("garbage", ["row 99", "distribution of NaN"])
def test_distribution_row_of_a_deterministic_node_is_never_read(garbage: str) -> None:
    """One sampled child of the root, and below it two deterministic ones whose distribution
    row means nothing.
    """
    shape = TreeShape.of([(0,), (0, 0), (0, 1)])
    distributions = torch.tensor([[0.7, 0.2, 0.1], [math.nan, math.nan, math.nan]])
    row = 99 if garbage == "row 99" else 1
    tree = DraftTree.static(
        shape,
        torch.tensor([[0, 1, 2]]),
        None,
        torch.tensor([[True, False, False]]),
        Proposal(distributions[None], torch.tensor([[0, row, row]])),
    )
    validate(tree, 3)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = output_distribution(tree, logits)
    below = {output[1]: 0.0 for output in found if len(output) > 1}
    for output, p in found.items():
        if len(output) > 1:
            below[output[1]] += p
    reached = sum(below.values())
    wanted = logits[1].softmax(-1)
    assert {x: p / reached for x, p in below.items()} == pytest.approx(
        {x: float(wanted[x]) for x in range(3)}, abs=1e-12
    )


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.01, 5.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_distribution_is_finite_at_every_temperature(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[60000.0, -60000.0, 59000.0, -math.inf]], dtype=dtype)
    for sampling in (
        Sampling(temperature),
        Sampling(temperature, top_p=0.9),
        Sampling(temperature, min_p=0.1),
    ):
        distribution = sampling.support(logits).dense(4)
        assert distribution.isfinite().all() and float(distribution.sum()) == pytest.approx(
            1, abs=1e-6
        )
        assert float(distribution[0, 3]) == 0


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
@pytest.mark.parametrize("size", [40, 200, 2048])
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


KINDS = {
    "medusa": MedusaConfig(heads=3, draft_vocab=64),
    "markov": MedusaConfig(heads=3, draft_vocab=64, markov_rank=8),
    "hydra_heads": HydraHeadsConfig(heads=3, blocks=1, draft_vocab=64),
    "eagle1": EagleConfig(kind="eagle1", draft_vocab=64, depth=3),
    "eagle3": EagleConfig(kind="eagle3", draft_vocab=64, depth=3),
    "dflash": BlockConfig(block=4, draft_vocab=64),
    "dspark": BlockConfig(kind="dspark", block=3, draft_vocab=64, markov_rank=4),
    "small_lm": None,
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_drafter_with_one_bad_row_is_refused_or_harmless(kind: str, bad: float) -> None:
    """One row of its LM head is not finite, as after an overflow in half precision. Nothing
    but the target's own tokens comes out at T = 0; where candidates are drawn the run ends in
    words instead of another distribution."""
    target = tiny_target()
    for shape in ("chain", "tree"):
        if kind == "small_lm":
            static = TreeShape.of([(0,), (1,), (0, 0), (0, 1)])
            form = Form.chain(3) if shape == "chain" else Form.tree(3, static=static)
            drafter = DraftModel(tiny_target(seed=3), form)
            drafter.proj = drafter.proj.clone()
        else:
            cfg = KINDS[kind]
            counts = torch.arange(target.vocab_size) + 1
            drafter = (
                head_class(cfg.kind)
                .for_target(target, cfg, counts)
                .drafter(target, DraftSpec(shape=shape))
            )
        owner = drafter.parallel if hasattr(drafter, "parallel") else drafter
        owner.proj = owner.proj.clone()
        owner.proj[..., 5, :] = bad
        requests = [Request([3, 1, 4, 1], 8, id=i) for i in range(2)]
        plain = generate(target, NoDraft(), requests, Sampling(0.0), batch_size=2)
        try:
            greedy = generate(target, drafter, requests, Sampling(0.0), batch_size=2)
        except UserError as error:
            assert "drafter: row 0, node" in str(error)
        else:
            assert [g.token_ids for g in greedy.generations] == [
                g.token_ids for g in plain.generations
            ]
        with pytest.raises(
            UserError, match=r"drafter: row 0, node \d+: the distribution .* NaN or infinity"
        ):
            generate(target, drafter, requests, Sampling(1.0), batch_size=2)


@pytest.mark.usefixtures("anywhere")
def test_logits_that_no_path_reaches_may_be_anything() -> None:
    """Below a candidate that the target never takes nothing is looked at."""
    tokens = torch.tensor([[1, 2]])
    distribution = torch.zeros(1, 3, 4, dtype=torch.float64)
    distribution[0, 0, 1] = distribution[0, 1, 2] = distribution[0, 2, 3] = 1
    row = torch.tensor([[0, 1]])
    tree = DraftTree.chain(
        tokens, None, torch.ones(1, 2, dtype=torch.bool), Proposal(distribution, row)
    )
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 1] = -torch.inf
    logits[0, 1] = torch.nan
    found = Distribution(Sampling(1.0), logits, tree)
    verdict = traversal(tree, found, Rng(0, torch.tensor([0]), torch.tensor([0])))
    found.check()
    assert verdict.length.tolist() == [0] and verdict.bonus.tolist() != [1]


@pytest.mark.usefixtures("anywhere")
def test_logits_where_a_budget_ends_may_be_anything() -> None:
    """A row's draft is cut above a slot that has a child in the shape, and the path ends before:
    the cut slot's distribution is not looked at."""
    tokens = torch.tensor([[1, 2], [1, 2]])
    distribution = torch.full((2, 2, 4), 0.25, dtype=torch.float64)
    row, drawn = torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2, dtype=torch.bool)
    tree = DraftTree.chain(tokens, torch.tensor([2, 1]), drawn, Proposal(distribution, row))
    logits = torch.zeros(2, 3, 4)
    logits[:, 0, 1] = -20.0
    logits[1, 1] = torch.nan
    found = Distribution(Sampling(1.0), logits, tree)
    rows = torch.arange(2)
    verdict = traversal(tree, found, Rng(0, rows, torch.zeros_like(rows)))
    found.check()
    assert verdict.length.tolist() == [0, 0] and 1 not in verdict.bonus.tolist()


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
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
