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
from outrider.decode.cache import TreeCache
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.grow import Form
from outrider.decode.models.tiny import tiny_model
from outrider.decode.records import Cycle
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.decode.verify import RULES, verify
from outrider.scripts import certify
from outrider.scripts.certificate import detection, enumerator, layers, passes, pit, uniformity
from outrider.scripts.certificate.controls import ScoredSharper
from outrider.scripts.certificate.engine_distribution import (
    TableDrafter,
    engine_distribution,
    toy_model,
)
from outrider.scripts.certificate.enumerator import Branches, Case, naive_distribution
from outrider.scripts.certificate.greedy import (
    GreedyReading,
    _classify,
    greedy_layer,
    greedy_of,
    reference_tokens,
)
from outrider.scripts.certificate.recorder import Recorder, astray
from outrider.scripts.certificate.sampled import (
    GROUPS,
    MOST_TESTS,
    Setting,
    cycles,
    depths,
    sampling_layer,
    strata,
)
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.scoring.plain import Plain
from tests.helpers import wrong_rules
from tests.helpers.wrong_rules import commits_wrong_rows, leaks_siblings

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


def test_dependent_neighbours_are_found_where_the_marginal_is_uniform() -> None:
    rng = np.random.default_rng(3)
    base = rng.random(3000)
    u = np.where(rng.random(3000) < 0.2, np.roll(base, 1), base)
    pairs = uniformity.independence(u, np.arange(3000) > 0, "pairs")
    tests = {t.name.partition(",")[0]: t.p for t in (*uniformity.uniformity(u, "all"), *pairs)}
    assert tests["Kolmogorov-Smirnov"] > 1e-3 and tests["correlation"] < 1e-9


def test_a_shift_that_the_bound_promises_is_seen() -> None:
    """Mass moved from one end of an order to the other: found in 95 of 100 samples or more, and
    in few where it is a third as large."""
    rng, n, alpha = np.random.default_rng(4), 1000, 1e-4
    shift = detection.detectable(n, alpha, MOST_TESTS)
    assert shift is not None and abs(detection.tokens_for(shift, alpha, MOST_TESTS) - n) < 30

    def share(moved: float) -> float:
        seen = 0
        for _ in range(100):
            u = rng.random(n)
            late = (u > 0.5) & (rng.random(n) < 2 * moved)  # total variation `moved`
            u = np.where(late, u - 0.5, u)
            seen += uniformity.kolmogorov(u)[1] < alpha / MOST_TESTS
        return seen / 100

    assert share(shift) >= 0.9 and share(shift / 3) < 0.2
    assert detection.detectable(5, alpha, MOST_TESTS) is None


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
    tokens: int = 1000,
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
    assert len(found.u) == 1000 and found.outside == found.astray == 0 and found.edge <= 1
    assert found.drafted > 0.1 and len(found.tests()) <= MOST_TESTS
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


def test_a_small_sample_is_drawn_from_few_requests(world: Any) -> None:
    """100 tokens, at most 40 an answer, once took 32 requests."""
    plain, own, prompts = world
    memo = Memo(None)
    how = Setting(ONE, 100, 40, 16)
    found = sampling_layer(plain, plain.target, own, prompts, how, memo=memo)
    assert len(found.u) == 100 and sum(row["requests"] for row in memo.lines("sampling")) <= 8


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
    mislaid = sample(world, ONE, ScoredSharper(world[1]))
    assert uniformity.overall(mislaid.tests()) < 1e-6
    cut, unwarped = Sampling(0.8, top_k=3), wrong_rules.bonus_unwarped
    impossible = sample(world, cut, verify=unwarped, tokens=600)
    assert impossible.outside
    assert "probability 0" in layers.sampling_json(impossible, 1e-4)["why"]


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


def test_the_strata_of_an_answer() -> None:
    """Prefill, then cycles of 3 proposed tokens of which 1, 0, 0, 3, 1 are accepted, and one
    without a draft."""
    accepted, made, start = (1, 0, 0, 3, 1, 0), list[Cycle](), 1
    for i, count in enumerate(accepted):
        made.append(Cycle(3 if i < 5 else 0, count, (0,) * count, False, start))
        start += count + 1
    answer = Generation([1], list(range(start)), made, [False] * start)
    assert depths(answer).tolist() == [0, 0, 1, 0, 0, 0, 1, 2, 3, 0, 1, 0]
    found = strata(answer, depths(answer), cycles(answer))
    places = {name: np.flatnonzero(found[:, g]).tolist() for g, name in enumerate(GROUPS)}
    assert places["all tokens"] == list(range(12)) and places["first of an answer"] == [0]
    assert places["first of a cycle, after a rejection"] == [3, 4, 5, 11]
    assert places["first of a cycle, after a whole draft"] == [9]
    assert places["place 1"] == [2, 6, 10] and places["bonus of a whole draft"] == [8]


REQUESTED = [
    Request([1, 2, 3], 12, id=7),
    Request([4, 2], 9, id=3),
    Request([5, 5, 5, 1], 12, id=11),
]


def test_a_recorder_has_every_token_with_the_logits_that_a_plain_pass_gives() -> None:
    """It changes nothing, and a loop that emits something else is noticed."""
    drafter, target = DraftModel(toy_model(seed=5, layers=1), 3), toy_model()
    seen = Recorder("traversal", REQUESTED)
    how: dict[str, Any] = {"verify": seen, "coins": seen.coins}
    run = generate(target, drafter, REQUESTED, ONE, batch_size=2, **how)
    bare = generate(target, drafter, REQUESTED, ONE, batch_size=2)
    assert [g.token_ids for g in bare.generations] == [g.token_ids for g in run.generations]
    lines = seen.emitted(run, REQUESTED)
    assert astray(lines, run) == 0 and sum(map(len, lines)) > 15
    for line, generation in zip(lines, run.generations, strict=True):
        ids, start = [*generation.prompt_ids, *generation.token_ids], len(generation.prompt_ids)
        with torch.no_grad():
            plain = target.model(torch.tensor([ids])).logits[0, start - 1 : -1]
        ours = torch.stack([e.call.kept[e.index] for e in line])
        assert torch.allclose(plain, ours, atol=1e-9)
    run.generations[1].token_ids[4] ^= 1
    assert astray(seen.emitted(run, REQUESTED), run) == 1


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


GOOD = {"name": "sampling", "passed": True, "why": "", "cycles_with_a_draft": 500}
CAUGHT = {"name": "x", "layer": "greedy", "rejected": True}
BOUND = {"tokens": 5000, "enough": True}


def test_verdict_has_three_values() -> None:
    def of(layer: dict[str, Any], control: dict[str, Any], bound: dict[str, Any]) -> str:
        return layers.verdict([layer], [CAUGHT, control], bound)[0]

    missed = {**CAUGHT, "rejected": False}
    assert of(GOOD, CAUGHT, BOUND) == "lossless"
    assert of({**GOOD, "passed": False, "why": "off"}, missed, BOUND) == "not lossless"
    assert of(GOOD, missed, BOUND) == "undecided"
    assert of(GOOD, CAUGHT, {**BOUND, "enough": False}) == "undecided"
    assert of({**GOOD, "cycles_with_a_draft": 3}, CAUGHT, BOUND) == "undecided"
    greedy = {"name": "greedy", "passed": True}
    assert of(greedy, CAUGHT, layers.bound([greedy], 1e-4, 0.1)) == "lossless"


def command(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    keys = [
        "target=tiny",
        "target.hidden=32",
        "target.init_std=0.3",
        "cases=5",
        "greedy_prompts=2",
        "greedy_tokens=8",
        "tokens=400",
        "max_new_tokens=32",
        "detect=0.9",
        "quiet=true",
        f"out={out}",
        *more,
    ]
    with pytest.raises(SystemExit) as stop:
        certify.main(keys)
    path = out / "certificate.json"
    return int(stop.value.code or 0), json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration of whole loops takes seconds and has tests of its own."""
    monkeypatch.setattr(layers, "_loop_errors", lambda plan: [0.0])
    monkeypatch.setattr(files, "code_sha256", lambda *_: "the code is edited while tests run")


def test_command_writes_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    code, paper = command(tmp_path / "c", "drafter=ngram", "temperature=1", "tokens=1200")
    assert (code, paper["verdict"]) == (0, "lossless"), paper["reasons"]
    said = capsys.readouterr().out
    assert said.startswith("LOSSLESS: ngram on tiny-llama") and "is seen with probability" in said
    assert [x["name"] for x in paper["layers"]] == ["exact", "greedy", "sampling", "passes"]
    negative = {c["layer"]: c["rejected"] for c in paper["negative_controls"]}
    assert negative == {"exact": True, "greedy": True, "sampling": True}
    assert paper["format"] == 4 and paper["bound"]["tokens"] == 1200
    assert 0.05 < paper["bound"]["shift"] < 0.12
    assert len(paper["identities"]["target"]["weights_sha256"]) == 64
    page = (tmp_path / "c" / "certificate.html").read_text()
    assert paper["bound"]["said"] in page and "wrong code through the same layers" in page
    assert not any(word in page for word in ('src="', 'href="http', "<script", "@import"))
    left = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert left == ["certificate.html", "certificate.json"]


def test_an_undecided_certificate_goes_on_with_more_tokens(tmp_path: Path, no_loops: None) -> None:
    keys = ("drafter=none", "temperature=1")
    code, paper = command(tmp_path / "b", *keys, "detect=0.1")
    assert (code, paper["verdict"]) == (3, "undecided") and not paper["resumed"]
    assert "set tokens higher" in paper["reasons"][-1]
    assert (tmp_path / "b" / "unfinished").is_dir()  # more tokens build on these
    code, paper = command(tmp_path / "b", *keys, "detect=0.1", "tokens=null")
    assert (code, paper["resumed"]) == (0, True) and not (tmp_path / "b" / "unfinished").exists()
    assert 1000 < paper["bound"]["tokens"] < 1400 and paper["bound"]["shift"] <= 0.1


def test_command_at_temperature_zero(tmp_path: Path, no_loops: None) -> None:
    code, paper = command(tmp_path / "a", "drafter=ngram", "temperature=0")
    assert (code, paper["verdict"]) == (0, "lossless") and paper["bound"]["tokens"] == 0
    assert [c["layer"] for c in paper["negative_controls"]] == ["exact", "greedy"]


def test_command_finds_a_broken_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "rejection", wrong_rules.residual_stale)
    keys = ("drafter=none", "temperature=0", "verify=rejection", "cases=40")
    code, paper = command(tmp_path / "c", *keys)
    assert (code, paper["verdict"]) == (1, "not lossless")
    assert paper["reasons"][0].startswith("layer exact: output distribution off by")


def test_an_interrupted_certificate_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(layers, "exact_layer", stopped)
    assert command(tmp_path / "c", "drafter=none", "temperature=1") == (130, {})
    assert "same command again" in capsys.readouterr().err


@pytest.mark.slow
def test_the_defaults_end_in_a_verdict(tmp_path: Path) -> None:
    """The line of the README, on a target that is there at once."""
    with pytest.raises(SystemExit) as stop:
        certify.main(["target=tiny", "drafter=ngram", "temperature=1", f"out={tmp_path}"])
    paper = json.loads((tmp_path / "certificate.json").read_text())
    assert (stop.value.code, paper["verdict"]) == (0, "lossless"), paper["reasons"]


def test_settings_survive_in_the_plan() -> None:
    cfg = certify.CertifyConfig(out="x", drafter="none", temperature=0.6, top_p=0.9)
    assert cfg.sampling() == Sampling(0.6, top_p=0.9) and faults(cfg) == []
    assert faults(dataclasses.replace(cfg, tokens=0))[0].startswith("tokens: 0")
    assert faults(dataclasses.replace(cfg, seconds=9.0))[0].startswith("seconds: says nothing")
