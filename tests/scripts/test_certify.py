"""scripts/certify.py: the exact distributions, the transforms and their tests, the layers on a tiny
target, the verdict.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.conf.typed import faults
from outrider.decode import residual, siblings, view
from outrider.decode.cache import TreeCache
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.grow import Form
from outrider.decode.models.tiny import tiny_model
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.decode.verify import RULES, verify
from outrider.scripts import certify
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import silent
from outrider.scripts.proofs import (
    certificate,
    enumerator,
    passes,
    pit,
    power,
    size,
    uniformity,
)
from outrider.scripts.proofs.controls import certificates as certificate_controls
from outrider.scripts.proofs.controls import drafters as wrong_drafters
from outrider.scripts.proofs.controls import rules as wrong_rules
from outrider.scripts.proofs.controls.catalogue import Mangled, commits_wrong_rows, leaks_siblings
from outrider.scripts.proofs.engine_distribution import TableDrafter, engine_distribution, toy_model
from outrider.scripts.proofs.enumerator import Branches, Case, naive_distribution
from outrider.scripts.proofs.greedy import (
    GreedyReading,
    Plain,
    _classify,
    greedy_layer,
    greedy_of,
    reference_tokens,
)
from outrider.scripts.proofs.sampled import (
    Setting,
    _depths,
    bank_of,
    most_tests,
    sampling_layer,
    texts_of,
)
from outrider.scripts.reports import certificate_page

TREE = TreeShape.of([(0,), (1,), (0, 0)])
ONE = Sampling(1.0)


def drafters(vocab: int) -> list[tuple[Any, TreeShape | None]]:
    tables = [(TableDrafter(TREE, scheme, vocab), TREE) for scheme in enumerator.SCHEMES]
    return [(NoDraft(), None), (DraftModel(toy_model(vocab, seed=5, layers=1), 2), None), *tables]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("which", range(6))
def test_distribution_of_the_whole_loop_is_exact(which: int, rule: str) -> None:
    drafter, shape = drafters(6)[which]
    for sampling in (ONE, Sampling(0.8, top_p=0.9), Sampling(1.0, repetition_penalty=1.3)):
        found = engine_distribution(toy_model(6), drafter, [3, 1, 4], 3, sampling, rule, shape)
        assert found.error <= 1e-9 and found.outputs > 10


@pytest.mark.parametrize("rule", RULES)
def test_distribution_of_the_whole_loop_is_exact_where_drafts_are_two_deep(rule: str) -> None:
    for drafter, shape in drafters(3)[1:]:
        found = engine_distribution(toy_model(vocab=3), drafter, [1, 2], 4, ONE, rule, shape)
        assert found.error <= 1e-9


def test_numbers_of_the_prefill_and_the_first_cycle_differ() -> None:
    heard: list[float] = []

    class Recorder(Rng):
        def uniform(self, rows: torch.Tensor, node: torch.Tensor, purpose: int) -> torch.Tensor:
            u = super().uniform(rows, node, purpose)
            heard.extend(u.flatten().tolist())
            return u

    generate(toy_model(), NoDraft(), [Request([1, 2], 2)], ONE, eos_ids=(), coins=Recorder)
    assert len(heard) == len(set(heard)) == 2


# --- transforms


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [
            (1.0, 0, 1.0, 0.0),
            (0.6, 3, 1.0, 0.0),
            (1.3, 0, 0.7, 0.0),
            (1.0, 0, 1.0, 0.3),
            (0.8, 4, 0.8, 0.1),
        ]
    ),
)
@example(70584, (1.3, 0, 0.7, 0.0))  # the third token lies 1.4e-6 beyond the edge
def test_places_agree_with_the_distribution_written_with_sums(
    seed: int, s: tuple[float, int, float, float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64) * 2
    logits = logits.round(decimals=1)  # ties occur
    sampling = Sampling(*s)
    distribution = naive_distribution(logits, sampling)
    found = pit.places(logits.expand(6, 6), torch.arange(6), sampling)
    order = sorted(range(6), key=lambda i: (-distribution[i], -logits[i], i))
    for rank, token in enumerate(order):
        if found.edge[token]:  # inside by float32's tolerance, which sums in float64 do not have
            assert distribution[token] == 0
            continue
        assert found.mass[token] == pytest.approx(float(distribution[token]), abs=1e-12)
        if distribution[token] > 0:
            below = sum(float(distribution[t]) for t in order[:rank])
            assert found.below[token] == pytest.approx(below, abs=1e-12)
    assert (found.outside == ((distribution.numpy() == 0) & ~found.edge)).all()


def test_places_apply_the_repetition_penalty_to_the_history() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    sampling = Sampling(1.0, repetition_penalty=2.0)
    found = pit.places(logits, torch.tensor([0]), sampling, [[0, 1, 1]])
    distribution = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64).softmax(-1)
    assert found.mass[0] == pytest.approx(float(distribution[0]))


def test_a_token_at_the_edge_is_message_from_an_impossible_one() -> None:
    """Only float32's rounding is forgiven; what is forgiven has a place in the wider
    distribution."""
    logits = torch.tensor([[0.0, -1.0, -1.000001, -1.01]], dtype=torch.float64)
    wider = logits[0, :3].softmax(-1)
    for token, edge in ((1, False), (2, True), (3, False)):
        for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, min_p=math.exp(-1.0))):
            found = pit.places(logits, torch.tensor([token]), sampling)
            assert bool(found.outside[0]) == (token == 3) and bool(found.edge[0]) == edge
            assert found.edge_mass[0] == pytest.approx(float(wider[2]), abs=1e-6)
            if edge:
                assert found.mass[0] == pytest.approx(float(wider[2]), abs=1e-6)


def test_forgiven_tokens_have_a_price() -> None:
    """A decoder that is forgiven more often than the distributions expect is rejected."""
    assert uniformity.edge_test(0, 0.0, 5000) == []
    assert uniformity.edge_test(1, 0.9, 5000)[0].p > 0.5
    assert (
        uniformity.edge_test(12, 0.9, 5000)[0].p < 1e-8
        and uniformity.edge_test(2, 1e-6, 5000)[0].p < 1e-11
    )


def test_p_values_are_those_of_scipy() -> None:
    from scipy import stats

    for exponent in (1.0, 1.05, 1.2):
        u = np.random.default_rng(1).random(4000) ** exponent
        assert uniformity.kolmogorov(u)[1] == pytest.approx(
            stats.kstest(u, "uniform").pvalue, rel=0.05
        )
        counts = np.histogram(u, 20, (0, 1))[0]
        assert uniformity.chi_square(counts)[1] == pytest.approx(
            stats.chisquare(counts).pvalue, rel=1e-9
        )


def test_uniform_numbers_raise_false_alarms_at_the_stated_rate() -> None:
    rng, sequence = np.random.default_rng(2), np.repeat(np.arange(20), 40)
    same = np.r_[False, sequence[1:] == sequence[:-1]]
    p = []
    for u in rng.random((1000, 800)):
        tests = (*uniformity.uniformity(u, "all"), *uniformity.independence(u, same, "pairs"))
        p.append([t.p for t in tests])
    share = (np.array(p) < 0.05).mean(0)
    assert ((share > 0.025) & (share < 0.075)).all()


def test_pairs_that_the_first_token_selects_raise_no_false_alarms() -> None:
    """A cycle goes on behind an accepted token: that is not uniform, what follows it is."""
    rng, p = np.random.default_rng(5), []
    for u in rng.random((400, 1500)):
        joined = np.r_[False, rng.random(1499) < u[:-1]]  # likelier after a large one
        p.append([t.p for t in uniformity.independence(u, joined, "pairs")])
    share = (np.array(p) < 0.05).mean(0)
    assert ((share > 0.02) & (share < 0.085)).all()


def test_a_correlation_is_measured_by_what_the_first_tokens_spread() -> None:
    """Given the first ones a, the sum of a b has the variance of sum(a^2) / 12, whatever a is:
    here places near the middle, whose spread is a tenth of a uniform's."""
    rng, found = np.random.default_rng(8), []
    for u in rng.random((300, 3000)):
        centred = (u - 0.5).tolist()
        near = [(a, b) for a, b in zip(centred[:-1], centred[1:], strict=True) if abs(a) < 0.16]
        test = uniformity.independence(u, np.r_[False, abs(u[:-1] - 0.5) < 0.16], "pairs")[0]
        spread = math.sqrt(sum(a * a for a, _ in near) / 12)
        z = sum(a * b for a, b in near) / spread
        assert test.n == len(near) and test.statistic == pytest.approx(z)
        assert test.p == pytest.approx(math.erfc(abs(z) / math.sqrt(2)))
        found.append(test.statistic)
    assert 0.85 < float(np.std(found)) < 1.15 and abs(float(np.mean(found))) < 0.25


def test_dependent_neighbours_are_found_where_the_marginal_is_uniform() -> None:
    rng = np.random.default_rng(3)
    base = rng.random(3000)
    u = np.where(rng.random(3000) < 0.2, np.roll(base, 1), base)
    pairs = uniformity.independence(u, np.arange(3000) > 0, "pairs")
    tests = {t.name.partition(",")[0]: t.p for t in (*uniformity.uniformity(u, "all"), *pairs)}
    assert tests["Kolmogorov-Smirnov"] > 1e-3 and tests["correlation"] < 1e-9


def test_dependent_pairs_are_found_where_the_first_token_selects_them() -> None:
    u = np.random.default_rng(0).random(4000)
    repeats = np.r_[False, u[:-1] < 0.4] & (np.random.default_rng(1).random(4000) < 0.5)
    u[repeats] = u[np.flatnonzero(repeats) - 1]  # half of them in the cell of the token before
    joined = np.r_[False, u[:-1] < 0.4]
    assert min(t.p for t in uniformity.independence(u, joined, "pairs")) < 1e-9


# --- layers on a small target of the user's kind


@pytest.fixture(scope="module")
def world() -> tuple[Plain, Drafter, list[list[int]]]:
    target = Target(tiny_model(vocab=40, hidden=32, init_std=0.3))
    draft = Target(tiny_model(vocab=40, hidden=32, init_std=0.3, layers=1))
    # the first layer alone: a fair draft
    draft.model.load_state_dict(target.model.state_dict(), strict=False)
    prompts = [[3 + i, 5, 7 + 2 * i, 9] for i in range(6)]
    return Plain(target), DraftModel(draft, 3), prompts


def sample(
    world: Any,
    sampling: Sampling,
    drafter: Any = None,
    verify: Any = "traversal",
    tokens: int = 3000,
    guidance: float | None = None,
) -> Any:
    plain, own, prompts = world
    how = Setting(sampling, tokens, 40, 16, 0, verify, guidance)
    return sampling_layer(plain, plain.target, drafter or own, prompts, how)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "sampling", [ONE, Sampling(0.8, top_p=0.9), Sampling(1.0, repetition_penalty=1.2)]
)
def test_emitted_tokens_are_uniform_under_the_distribution_of_plain_passes(
    world: Any, sampling: Sampling, rule: str
) -> None:
    found = sample(world, sampling, verify=rule)
    assert len(found.u) == 3000 and found.outside == found.astray == 0 and found.edge <= 1
    assert found.drafted > 0.1 and "later in a cycle" in found.strata()
    assert uniformity.overall(found.tests()) > 1e-4


def test_penalty_and_guidance_belong_to_the_distribution(world: Any) -> None:
    """What was emitted is uniform under the distribution with them, and not without them."""
    for sampling, guidance in ((Sampling(1.0, repetition_penalty=1.3), None), (ONE, 1.5)):
        found = sample(world, sampling, guidance=guidance, tokens=1500)
        assert found.outside == 0 and uniformity.overall(found.tests()) > 1e-4
    plain, own, prompts = world
    how = Setting(ONE, 400, 40, 16)

    class Unguided(Plain):
        def in_batches(self, sequences: Any, guidance: float | None = None) -> Any:
            return super().in_batches(sequences)

    guided = dataclasses.replace(how, guidance=2.0)
    for judge, passed in ((plain, True), (Unguided(plain.target), False)):
        found = sampling_layer(judge, plain.target, own, prompts, guided)
        layer = passes_of(judge, found, prompts, 2.0)
        assert layer["passed"] == passed


@pytest.mark.parametrize("rule", RULES)
def test_distribution_of_the_guided_loop_is_exact(rule: str) -> None:
    tables = [
        (TableDrafter(TREE, "without", 4), TREE),
        (DraftModel(toy_model(4, seed=5, layers=1), 2), None),
    ]
    for drafter, shape in tables:
        target = toy_model(vocab=4)
        found, unguided = (
            engine_distribution(target, drafter, [3, 1, 2], 3, ONE, rule, shape, guidance)
            for guidance in (1.5, None)
        )
        assert found.error <= 1e-9 and unguided.outputs == found.outputs


def test_a_sample_tells_how_far_it_is_before_it_is_saved(world: Any, tmp_path: Path) -> None:
    plain, own, prompts = world
    told: list[tuple[int, int]] = []
    memo = Memo(tmp_path / "p", {"a": 1})

    def on_progress(done: int, total: int, _: str = "") -> None:
        if not memo.lines("sampling"):
            told.append((done, total))

    how = Setting(ONE, 1500, 12, 16)
    sampling_layer(plain, plain.target, own, prompts, how, on_progress=on_progress, memo=memo)
    counts = [done for done, _ in told]
    first = memo.lines("sampling")[0]["size"]
    assert {total for _, total in told} == {1500}
    assert len(counts) > 5 and counts[0] == 0 and counts == sorted(set(counts))
    assert first <= counts[-1] < 1500  # a draft may end behind the last token of its answer


def test_a_sample_goes_on_where_it_stopped(world: Any, tmp_path: Path) -> None:
    plain, own, prompts = world
    how = Setting(ONE, 1500, 12, 16)
    whole = sampling_layer(plain, plain.target, own, prompts, how)

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    memo = Memo(tmp_path / "p", {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        sampling_layer(plain, plain.target, own, prompts, how, stop, memo=memo)
    again = Memo(tmp_path / "p", {"a": 1})
    assert again.resumed and len(again.lines("sampling")) == 1
    with (tmp_path / "p" / "sampling.jsonl").open("a") as file:
        file.write('{"requests": 32, "u": [0.1')  # a crash in mid-line
    resumed = sampling_layer(plain, plain.target, own, prompts, how, memo=again)
    for name in ("u", "depth", "sequence", "groups", "passes"):
        assert (getattr(resumed, name) == getattr(whole, name)).all(), name
    assert resumed.tests() == whole.tests()
    assert (resumed.drafted, resumed.proposals) == (whole.drafted, whole.proposals)
    assert Memo(tmp_path / "p", {"a": 2}).lines("sampling") == []


def test_wrong_rules_and_wrong_distributions_are_rejected(world: Any) -> None:
    typical = sample(world, ONE, verify=wrong_rules.typical_acceptance)
    assert uniformity.overall(typical.tests()) < 1e-6
    for wrong in (wrong_drafters.scored_unwarped, wrong_drafters.scored_sharpened):
        mislaid = sample(world, ONE, Mangled(world[1], wrong))
        assert uniformity.overall(mislaid.tests()) < 1e-6, wrong.__name__
    cut, unwarped = Sampling(0.8, top_k=3), wrong_rules.bonus_unwarped
    impossible = sample(world, cut, verify=unwarped, tokens=600)
    assert impossible.outside
    assert "probability 0" in certificate.sampling_json(impossible, 1e-4)["why"]


def passes_of(judge: Plain, found: Any, prompts: Any, guidance: float | None = None) -> Any:
    """The layer "passes" of a sample, its yardstick from texts that no wrong judge touches."""
    judge = Plain(judge.target)
    requested = [Request(p, 12, id=i) for i, p in enumerate(prompts)]
    run = generate(judge.target, NoDraft(), requested, ONE)
    texts = [([*g.prompt_ids, *g.token_ids], len(g.prompt_ids)) for g in run.generations]
    first = np.r_[True, found.sequence[1:] != found.sequence[:-1]]
    yardstick = passes.yardstick(judge, texts, ONE, guidance)
    return passes.passes_json(found.depth, first, found.passes, yardstick)


def test_wrong_masks_and_caches_show_in_the_distributions_that_were_used(world: Any) -> None:
    plain, own, prompts = world
    how = Setting(ONE, 400, 40, 16)
    tree = DraftModel(own.draft, Form.tree(2, nodes=6, width=2))
    cases = [
        (plain.target, own, True),
        (plain.target, tree, True),
        (leaks_siblings(plain.target), tree, False),
        (commits_wrong_rows(plain.target), own, False),
    ]
    for target, drafter, passed in cases:
        layer = passes_of(plain, sampling_layer(plain, target, drafter, prompts, how), prompts)
        assert layer["passed"] == passed, layer["why"]


def test_place_in_the_cycle_counts_from_its_first_token() -> None:
    target = toy_model()
    drafter = TableDrafter(TREE, "without", 8)
    run = generate(target, drafter, [Request([1, 2], 20)], ONE, eos_ids=())
    generation: Generation = run.generations[0]
    wanted = [0]
    for cycle in generation.cycles:
        wanted += range(cycle.accepted + 1)
    assert _depths(generation).tolist() == wanted[: len(generation.token_ids)]


def test_greedy_layer_passes_sound_code_and_names_defects(world: Any) -> None:
    plain, own, prompts = world

    def run(target: Target, verify: Any) -> Any:
        return greedy_layer(plain, target, own, prompts, GreedyReading(24, 4, 1e-4, verify))

    good = run(plain.target, "traversal")
    assert good.divergences == [] and good.accepted > 0 and good.tokens > 6 and good.astray == 0
    wrong = run(plain.target, wrong_rules.softmax_acceptance)
    assert wrong.defects > 0 and wrong.astray > 0
    assert run(commits_wrong_rows(plain.target), "traversal").defects > 0


def test_greedy_layer_sees_what_goes_wrong_in_a_batch_of_one(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single row takes ways of its own through the cache; here it forgets to move."""
    plain, own, _ = world
    prompts = [[first, 5, 7, 9] for first in (15, 18, 27)]
    tree = DraftModel(own.draft, Form.tree(3, nodes=7, width=3))
    compact = TreeCache._compact

    def lazy(cache: TreeCache, path: Tensor, deepest: int) -> None:
        if len(cache.physical) > 1:
            compact(cache, path, deepest)

    monkeypatch.setattr(TreeCache, "_compact", lazy)
    found = greedy_layer(
        plain, plain.target, tree, prompts, GreedyReading(24, 4, 1e-4, "traversal")
    )
    places = {d["prompt"]: d["position"] for d in found.divergences if d["kind"] == "defect"}
    assert places[len(prompts) - 1] < 12, "the last one is alone from its first token on"


def test_greedy_layer_knows_penalty_and_guidance(world: Any) -> None:
    plain, own, prompts = world
    for sampling, guidance in ((Sampling(1.0, repetition_penalty=1.3), None), (ONE, 1.7)):

        def run(target: Target, how: Sampling, scale: float | None, theirs: Any = None) -> Any:
            reading = GreedyReading(16, 4, 1e-4, sampling=how, guidance=scale)
            return greedy_layer(plain, target, own, prompts, reading, theirs)

        assert run(plain.target, sampling, guidance).divergences == []
        requested = [Request(p, 16, id=i) for i, p in enumerate(prompts)]
        plainly = reference_tokens(plain, requested, Sampling(0.0), 4)
        assert plainly != reference_tokens(plain, requested, greedy_of(sampling), 4, guidance), (
            "the settings do nothing"
        )


def test_left_padding_of_the_reference_is_message_from_a_defect(world: Any) -> None:
    """An answer unlike a batched reference is compared with the reference alone."""
    plain, own, prompts = world
    requested = [Request(p, 12, id=i) for i, p in enumerate(prompts)]
    theirs = reference_tokens(plain, requested, Sampling(0.0), 4)
    theirs[2] = [t + 1 for t in theirs[2]]  # as if padding had moved it
    found = greedy_layer(plain, plain.target, own, prompts, GreedyReading(12, 4, 1e-4), theirs)
    assert found.divergences == []


def test_a_tie_within_rounding_is_no_defect() -> None:
    target = Target(tiny_model(vocab=40, hidden=32))
    plain = Plain(target)
    best, second = plain.logits([([3, 4, 5, 0], 3)])[0][0].topk(2).indices.tolist()
    out, short = Generation([3, 4, 5], [second, 9]), Generation([3, 4, 5], [best])
    reading = GreedyReading(12, 1, 1e-4, sampling=Sampling(0.0))
    found = _classify(plain, 0, out, [best, 9], reading)
    assert found["kind"] == "defect" and found["margin"] > 1e-4 and found["position"] == 0
    early = _classify(plain, 0, short, [best, 9], reading)  # stopped too early
    assert early["kind"] == "defect" and early["position"] == 1 and early["margin"] is None
    with torch.no_grad():
        target.model.lm_head.weight[second] = target.model.lm_head.weight[best]  # now the two tie
    assert _classify(plain, 0, out, [best, 9], reading)["kind"] == "rounding tie"


def test_plain_logits_do_not_depend_on_padding(world: Any) -> None:
    plain, _, _ = world
    texts = [([3, 4, 5, 6, 7, 8, 9], 4), ([9, 8, 7], 1), ([5] * 12, 11)]
    together = plain.logits(texts)
    for text, logits in zip(texts, together, strict=True):
        alone = plain.target.model(torch.tensor([text[0][:-1]])).logits[0, text[1] - 1 :]
        assert logits.shape == alone.shape and torch.allclose(logits, alone, atol=1e-4)


# --- verdict and command

GOOD = {"name": "sampling", "passed": True, "why": ""}


class Found:
    """A sample of so many tokens whose tests come to `p`."""

    outside = astray = 0

    def __init__(self, p: float, tokens: int) -> None:
        self.p, self.u = p, np.zeros((tokens, 1))

    def tests(self) -> list[uniformity.Test]:
        return [uniformity.Test("x", "all", len(self.u), 0.0, self.p)]


def plan_of(sampling: Sampling, tokens: int) -> certificate.CertificatePlan:
    few = {"cases": 40, "greedy_prompts": 2, "greedy_tokens": 8, "alpha": 1e-4, "detect": 0.1}
    return certificate.CertificatePlan(sampling, tokens, 20, 16, **few)


@pytest.mark.parametrize("warm", [1e-9, 0.4])
def test_a_control_too_faint_at_a_low_temperature_is_tried_at_one(
    world: Any, monkeypatch: pytest.MonkeyPatch, warm: float
) -> None:
    requested: list[tuple[float, int]] = []

    def layer(plain: Any, target: Any, who: Any, prompts: Any, how: Setting, *rest: Any) -> Found:
        requested.append((how.sampling.temperature, how.tokens))
        return Found(warm if how.sampling.temperature == 1 else 0.03, how.tokens)

    monkeypatch.setattr(certificate_controls, "sampling_layer", layer)
    plain, own, prompts = world
    cold = Sampling(0.2, top_p=0.8)
    plan, memo = plan_of(cold, 5000), Memo(None)
    parts = (plain.target, plain, plan, memo, silent, prompts)
    open_world = certificate.World(*parts, [], {}, 0.0, [])
    rows = certificate_controls._sampling(open_world)
    assert len(rows) == 4 and set(requested) == {(0.2, 2000), (1.0, 5000)}
    for row in rows:
        assert row["rejected"] == (warm < 1e-4) and row["p"] == warm
        assert row["faint"] == {"temperature": 0.2, "rejected": False, "p": 0.03, "tokens": 2000}
    # warm enough to be judged by its own distributions
    warmer = dataclasses.replace(plan, sampling=Sampling(0.7))
    other = dataclasses.replace(open_world, plan=warmer, memo=Memo(None))
    rows = certificate_controls._sampling(other)
    assert not any("faint" in row or row["rejected"] for row in rows)


CAUGHT = {"name": "x", "layer": "greedy", "rejected": True}
POWER = {"tokens": 5000, "min_detectable": 0.05, "cycles_with_a_draft": 500}


def test_console_and_card_say_which_biases_are_surely_found() -> None:
    """Those of the families that they name; a keyed one, a watermark, needs more tokens."""
    families = dict.fromkeys(("another temperature", "ids, hashed"), {})
    paper: dict[str, Any] = {
        "verdict": "lossless",
        "reasons": [],
        "layers": [],
        "negative_controls": [],
        "server": {"url": "http://127.0.0.1:9", "kind": "vllm"},
        "power": {**POWER, "alpha": 1e-4, "families": families},
    }
    table = certificate_page.table(paper)
    (line,) = [row[-1] for row in table.rows if row[0] == "power"]
    assert line.startswith("smallest bias of 2 families that is surely found: 0.050")
    assert "watermark" in line and "needs more" in line
    assert table.notes[-1] == "families: another temperature; ids, hashed"
    card = dict(certificate_page._cards(paper))["5.0%"]
    assert "each of the 2 families below" in card and "watermark" in card
    assert "not surely found" not in line + card


def test_a_family_that_no_size_of_which_is_found_is_named() -> None:
    """It counts with the most that it can move, which says nothing of being found."""
    about = {"power_at": {"0.1": 0.0}, "at_detect": None}
    families = {
        "ids, hashed": {"min_detectable": 0.267, "largest": 0.264, **about},
        "temperature": {"min_detectable": 0.055, "largest": 0.676, **about},
    }
    power = {**POWER, "alpha": 1e-4, "detect": 0.27, "min_detectable": 0.267, "families": families}
    assert certificate_page.never_found(power) == {"ids, hashed": 0.264}
    card = dict(certificate_page._cards({"power": power, "negative_controls": []}))["26.7%"]
    assert "not surely found at any size: ids, hashed (at most 26.4%)" in card
    last = [row[-1] for row in certificate_page._families(power).rows]
    assert last == ["never, at most 26.4%", "5.5%"]


def test_verdict_has_three_values() -> None:
    bad = {**GOOD, "passed": False, "why": "distribution off"}
    missed = {**CAUGHT, "rejected": False}
    assert certificate.verdict([GOOD, bad], [missed], POWER, 0.1)[0] == "not lossless"
    assert certificate.verdict([GOOD], [CAUGHT, missed], POWER, 0.1)[0] == "undecided"
    assert certificate.verdict([GOOD], [], POWER, 0.1)[0] == "undecided"

    def of(power: dict[str, Any], detect: float = 0.1) -> tuple[str, list[str]]:
        return certificate.verdict([GOOD], [CAUGHT], power, detect)

    assert of(POWER) == of({"tokens": 0, "min_detectable": None}) == ("lossless", [])
    assert of(POWER, 0.01)[0] == "undecided"
    assert of({**POWER, "min_detectable": None})[0] == "undecided"
    assert of({**POWER, "cycles_with_a_draft": 3})[0] == "undecided"
    blind = {**POWER, "blind": ["temperature"], "families": {"temperature": {"at_detect": 0.4}}}
    state, reasons = of(blind)
    assert state == "undecided" and "'temperature' is found with probability 0.40" in reasons[0]


def command(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    keys = [
        "target=tiny",
        "target.hidden=32",
        "cases=10",
        "greedy_prompts=2",
        "greedy_tokens=8",
        "tokens=400",
        "max_new_tokens=32",
        "detect=0.9",
        "target.init_std=0.3",
        "quiet=true",
        f"out={out}",
        *more,
    ]
    with pytest.raises(SystemExit) as stop:
        certify.main(keys)
    path = out / "certificate.json"
    return int(stop.value.code or 0), json.loads(path.read_text()) if path.exists() else {}


def with_two_controls(patch: pytest.MonkeyPatch) -> None:
    """The static controls have a test of their own."""
    from outrider.scripts.proofs.controls.catalogue import controls

    patch.setattr(certificate_controls, "controls", lambda: [controls()[0]])
    known = "the code is edited while tests run"
    patch.setattr(certificate_controls, "code_sha256", lambda: known)
    patch.setattr(power, "MEMBERS", 1)
    patch.setattr(power, "MOST", 128)


def without_exact_layer(patch: pytest.MonkeyPatch) -> None:
    """It does not depend on what these tests change, and takes seconds."""
    layer = {**GOOD, "name": "exact", "cases": 1, "branches": 1, "edge_cases": 1}
    layer |= dict.fromkeys(("max_error", "edge_max_error", "loop_max_error"), 0.0)
    patch.setattr(certificate, "exact_layer", lambda plan, on_progress: layer)


@pytest.fixture
def two_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    with_two_controls(monkeypatch)


@pytest.fixture
def no_exact_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    without_exact_layer(monkeypatch)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate at T = 1 that ran its controls, which others name."""
    out = tmp_path_factory.mktemp("certified") / "first"
    with pytest.MonkeyPatch.context() as patch:
        with_two_controls(patch)
        without_exact_layer(patch)
        code, paper = command(out, "drafter=none", "temperature=1", "tokens=1500")
    assert (code, len(paper["negative_controls"])) == (0, 9), paper["reasons"]
    return out


def exact(temperature: float) -> dict[str, Any]:
    return certificate.exact_layer(plan_of(Sampling(temperature), 1), lambda *_: None)


def test_exact_layer_looks_at_the_edges_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier in float32, to which 1e-300 is 0, goes on with what is not finite."""
    assert exact(0.2)["passed"]
    monkeypatch.setattr(certificate, "_loop_errors", lambda plan: [0.0])  # seconds, and no edges
    assert exact(0.0)["edge_cases"] == 0

    whole = residual.level

    def rounded(value: Any) -> Any:
        return value.float().to(value.dtype) if value.is_floating_point() else value

    def narrow(siblings: Any, reach: Any, out: Any = None) -> Any:
        found = whole(residual.Siblings(*map(rounded, siblings)), rounded(reach), out)
        return residual.LevelVerdict(*map(rounded, found))

    monkeypatch.setattr(residual, "level", narrow)
    monkeypatch.setattr(Distribution, "refuse", lambda *_: None)
    layer = exact(0.2)
    assert layer["edge_max_error"] > 0.1 and not layer["passed"]
    # With a threshold that float32 knows only its rounding is left, at the edges too.
    for module in (residual, siblings, view):
        monkeypatch.setattr(module, "NOTHING", 1e-30)
    layer = exact(0.2)
    assert 1e-12 < layer["max_error"] < 1e-6 and layer["edge_max_error"] < 1e-6
    assert not layer["passed"]


def test_enumeration_does_not_pass_over_nan() -> None:
    case = Case.random(torch.Generator().manual_seed(1))
    case = dataclasses.replace(case, sampling=ONE, scheme="iid")

    class Astray(Branches):
        def __init__(self, scripts: list[list[int]]) -> None:
            super().__init__(scripts)
            self.weight[-1] = torch.nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enumerator, "Branches", Astray)
        assert enumerator.enumerate_case(case, verify).error == math.inf


def test_an_interrupted_certificate_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(certificate, "exact_layer", stopped)
    assert command(tmp_path / "c", "drafter=none", "temperature=1") == (130, {})
    assert "same command again" in capsys.readouterr().err


def test_command_writes_a_certificate(
    tmp_path: Path, two_controls: None, capsys: pytest.CaptureFixture
) -> None:
    code, paper = command(tmp_path / "c", "drafter=none", "temperature=1", "tokens=2500")
    assert (code, paper["verdict"]) == (0, "lossless"), paper["reasons"]
    assert capsys.readouterr().out.startswith("LOSSLESS: none on tiny-llama")
    tried = {"sampling", "passes", "greedy"}
    assert {layer["name"] for layer in paper["layers"]} == {"exact", *tried}
    assert all({"name", "layer", "rejected", "p"} <= set(c) for c in paper["negative_controls"])
    assert {c["layer"] for c in paper["negative_controls"]} == {"enumeration", *tried}
    assert {"tokens", "alpha", "min_detectable"} <= set(paper["power"])
    assert len(paper["identities"]["target"]["weights_sha256"]) == 64
    assert paper["versions"]["versions"]["torch"]
    page = (tmp_path / "c" / "certificate.html").read_text()
    assert page.count("<svg") == 2 and "between rare and frequent tokens" in page
    assert not any(word in page for word in ('src="', 'href="http', "<script", "@import"))
    left = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert left == ["certificate.html", "certificate.json"]


def test_controls_run_once_serve_other_drafters(
    tmp_path: Path, first: Path, two_controls: None, no_exact_layer: None, capsys: Any
) -> None:
    settings, theirs = ("temperature=1", "tokens=1500"), f"controls={first}"
    code, paper = command(tmp_path / "none", "drafter=none", "controls=none", *settings)
    assert (code, paper["verdict"]) == (3, "undecided") and paper["negative_controls"] == []
    assert "no negative control was run" in paper["reasons"][0]
    assert "not run" in (tmp_path / "none" / "certificate.html").read_text()
    code, paper = command(tmp_path / "second", "drafter=ngram", theirs, *settings)
    assert (code, paper["verdict"]) == (0, "lossless"), paper["reasons"]
    assert paper["controls"]["from"] == str(first)
    assert len(paper["negative_controls"]) == 9
    few = command(tmp_path / "few", "drafter=none", theirs, "temperature=1", "tokens=300")
    assert few[0] == 3
    assert any("not rejected by layer sampling" in reason for reason in few[1]["reasons"])
    capsys.readouterr()
    for more, words in (
        ([theirs, "temperature=0.5"], "differs in temperature;"),
        ([theirs, "temperature=1", "verify=rejection"], "differs in verify;"),
        ([theirs, "temperature=1", "target.seed=9"], "differs in weights_sha256;"),
        ([f"controls={tmp_path / 'second'}", *settings], "ran no controls of its own"),
        ([f"controls={tmp_path / 'none'}", *settings], "ran no controls of its own"),
        ([f"controls={tmp_path / 'nowhere'}", *settings], "No such file"),
    ):
        assert command(tmp_path / "x", "drafter=none", *more)[0] == 2
        assert words in capsys.readouterr().err


def test_tokens_follow_from_the_power_that_is_requested_for(
    tmp_path: Path,
    first: Path,
    two_controls: None,
    no_exact_layer: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """As many as a verdict takes, said before the first is drawn; a limit may be too low."""
    monkeypatch.setattr(size, "STEPS", (400, 1500, 4000))
    keys = ("drafter=none", "temperature=1", "tokens=null", "detect=0.3", "quiet=false")
    keys += (f"controls={first}",)
    code, paper = command(tmp_path / "a", *keys)
    said = " ".join(capsys.readouterr().out.split())
    assert (code, paper["verdict"]) == (0, "lossless"), paper["reasons"]
    assert paper["power"]["tokens"] == 1500 and paper["power"]["min_detectable"] <= 0.3
    assert "1,500 tokens: so many surely find a bias of detect=0.3" in said
    assert "minutes" in said.partition("LOSSLESS")[0]
    code, paper = command(tmp_path / "b", *keys, "most_tokens=300")
    assert (code, paper["verdict"]) == (3, "undecided") and paper["power"]["tokens"] == 300
    assert "300 tokens: too few to surely find" in " ".join(capsys.readouterr().out.split())
    code, paper = command(tmp_path / "b", *keys)  # goes on with what it has
    assert (code, paper["resumed"], paper["power"]["tokens"]) == (0, True, 1500)


def test_the_pilot_is_no_part_of_the_sample(world: Any) -> None:
    plain, own, prompts = world
    plan = dataclasses.replace(plan_of(ONE, 300), max_new_tokens=24)
    pilot = size.Pilot.drawn(plain, prompts, plan, Memo(None))
    memo = Memo(None)
    sampling_layer(plain, plain.target, own, prompts, plan, memo=memo)
    long = [t for t in texts_of(memo.lines("sampling"), prompts) if len(t[0]) > t[1] + 8]
    assert pilot.seconds > 0 and long and not any(text in pilot.texts for text in long)
    distribution = torch.cat([a.distribution for a in pilot.answers(plain, plan)])
    assert len(distribution) == power.rows_wanted(40) and torch.allclose(
        distribution.sum(-1), torch.ones(len(distribution))
    )


def test_no_sample_has_more_tests_than_were_reckoned_with(world: Any) -> None:
    bank = bank_of(world[0].target, 0)
    assert len(sample(world, ONE, tokens=6000).tests()) <= most_tests(bank)


@pytest.mark.slow
def test_the_defaults_end_in_a_verdict(tmp_path: Path) -> None:
    """The line of the README, on a target that is there at once."""
    with pytest.raises(SystemExit) as stop:
        certify.main(["target=tiny", "drafter=ngram", "temperature=1", f"out={tmp_path}"])
    paper = json.loads((tmp_path / "certificate.json").read_text())
    assert (stop.value.code, paper["verdict"]) == (0, "lossless"), paper["reasons"]


def test_command_at_temperature_zero_and_an_undecided_one(
    tmp_path: Path, first: Path, two_controls: None, no_exact_layer: None
) -> None:
    code, paper = command(tmp_path / "a", "drafter=ngram", "temperature=0")
    assert (code, paper["verdict"]) == (0, "lossless") and paper["power"]["tokens"] == 0
    sampled = ("drafter=none", "temperature=1", f"controls={first}")
    code, paper = command(tmp_path / "b", *sampled, "detect=0.01")
    assert (code, paper["verdict"]) == (3, "undecided") and not paper["resumed"]
    assert "set tokens higher" in paper["reasons"][-1]
    assert (tmp_path / "b" / "unfinished").is_dir()  # more tokens build on these
    code, paper = command(tmp_path / "b", *sampled, "detect=0.9", "tokens=1500")
    assert (code, paper["resumed"]) == (0, True) and not (tmp_path / "b" / "unfinished").exists()


def test_command_finds_a_broken_verifier(
    tmp_path: Path, two_controls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "rejection", wrong_rules.residual_stale)
    keys = ("drafter=none", "temperature=0", "verify=rejection", "cases=40")
    code, paper = command(tmp_path / "c", *keys)
    assert (code, paper["verdict"]) == (1, "not lossless")
    assert paper["reasons"][0].startswith("layer exact: output distribution off by")


def test_settings_survive_in_the_plan() -> None:
    cfg = certify.CertifyConfig(out="x", drafter="none", temperature=0.6, top_p=0.9)
    assert cfg.sampling() == Sampling(0.6, top_p=0.9) and faults(cfg) == []
    assert faults(dataclasses.replace(cfg, tokens=0))[0].startswith("tokens: 0")
