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

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.generation import Cycle
from outrider.decode.grow import Form
from outrider.decode.models.tiny import tiny_model
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.decode.verify import verify
from outrider.scripts import certify
from outrider.scripts.certificate import (
    enumerator,
    layers,
    sampled,
    transforms,
    uniformity,
)
from outrider.scripts.certificate.controls import ScoredSharper
from outrider.scripts.certificate.enumerator import Branches, Case, naive_distribution
from outrider.scripts.certificate.greedy import divergence, greedy_layer
from outrider.scripts.certificate.recorder import mismatches, recorded
from outrider.scripts.certificate.sampled import MOST_TESTS, sampling_layer
from outrider.scripts.certificate.setup import CertificatePlan, CertifySetup, open_setup
from tests.helpers import wrong_rules
from tests.helpers.commands import code_of
from tests.helpers.engine_distribution import (
    TableDrafter,
    engine_distribution,
    toy_model,
)

TREE = TreeShape.of([(0,), (1,), (0, 0)])
ONE = Sampling(1.0)


def test_distribution_of_the_whole_loop_is_exact() -> None:
    vocab = 6
    tables = [(TableDrafter(TREE, scheme, vocab), TREE) for scheme in enumerator.SCHEMES]
    draft = DraftModel(toy_model(vocab, seed=5, layers=1), 2)
    for sampling in (ONE, Sampling(0.8, top_p=0.9), Sampling(1.0, repetition_penalty=1.3)):
        for drafter, shape in [(NoDraft(), None), (draft, None), *tables]:
            found = engine_distribution(
                toy_model(6), drafter, [3, 1, 4], 3, sampling, verify, shape
            )
            assert found.error <= 1e-9 and found.outputs > 10, (drafter, sampling)
    guided = DraftModel(toy_model(4, seed=5, layers=1), 2)
    found = engine_distribution(toy_model(4), guided, [3, 1, 2], 3, ONE, verify, None, 1.5)
    assert found.error <= 1e-9


def test_enumeration_does_not_pass_over_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.random(torch.Generator().manual_seed(1))
    case = dataclasses.replace(case, sampling=ONE, scheme="iid")

    class Nan(Branches):
        def __init__(self, scripts: list[list[int]]) -> None:
            super().__init__(scripts)
            self.weight[-1] = torch.nan

    monkeypatch.setattr(enumerator, "Branches", Nan)
    assert enumerator.enumerate_case(case, verify).error == math.inf


# --- transforms and their tests

CUTS = [(1.0, 0, 1.0, 0.0), (0.6, 3, 1.0, 0.0), (1.3, 0, 0.7, 0.0)]
CUTS += [(1.0, 0, 1.0, 0.3), (0.8, 4, 0.8, 0.1)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(CUTS))
@example(70584, (1.3, 0, 0.7, 0.0))  # the third token lies 1.4e-6 beyond the edge
def test_places_agree_with_the_distribution_written_with_sums(
    seed: int, s: tuple[float, int, float, float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64) * 2
    logits = logits.round(decimals=1)  # ties occur
    sampling = Sampling(*s)
    distribution = naive_distribution(logits, sampling)
    found = transforms.places(logits.expand(6, 6), torch.arange(6), sampling)
    order = sorted(range(6), key=lambda i: (-distribution[i], -logits[i], i))
    for rank, token in enumerate(order):
        if distribution[token] == 0:  # inside by float32's tolerance at most
            assert found.outside[token] or seed == 70584
            continue
        assert found.mass[token] == pytest.approx(float(distribution[token]), abs=1e-12)
        below = sum(float(distribution[t]) for t in order[:rank])
        assert found.below[token] == pytest.approx(below, abs=1e-12)


def test_a_token_at_the_edge_is_told_from_an_impossible_one() -> None:
    logits = torch.tensor([[0.0, -1.0, -1.000001, -1.01]], dtype=torch.float64)
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, min_p=math.exp(-1.0))):
        found = transforms.places(logits.expand(3, 4), torch.tensor([1, 2, 3]), sampling)
        assert found.outside.tolist() == [False, False, True]
        assert found.mass[1] == pytest.approx(float(logits[0, :3].softmax(-1)[2]), abs=1e-6)


def test_uniform_numbers_raise_false_alarms_at_the_stated_rate() -> None:
    """Also where the first of two neighbours selects them: a cycle goes on behind an accepted
    token, which is not uniform, and what follows it is."""
    rng, p = np.random.default_rng(2), []
    for u in rng.random((1000, 1000)):
        selected = np.r_[False, rng.random(999) < u[:-1]]
        pairs = uniformity.independence(u, selected, "pairs", "by id")
        tests = (*uniformity.uniformity(u, "all", "by id"), *pairs)
        p.append([t.p for t in tests])
    share = (np.array(p) < 0.05).mean(0)
    assert ((share > 0.025) & (share < 0.075)).all()


def test_dependent_neighbours_are_found_where_the_marginal_is_uniform() -> None:
    rng = np.random.default_rng(3)
    base = rng.random(3000)
    u = np.where(rng.random(3000) < 0.2, np.roll(base, 1), base)
    pairs = uniformity.independence(u, np.arange(3000) > 0, "pairs", "by id")
    alone = uniformity.uniformity(u, "all", "by id")
    tests = {t.name.partition(",")[0]: t.p for t in (*alone, *pairs)}
    assert tests["Kolmogorov-Smirnov"] > 1e-3 and tests["correlation"] < 1e-9


def test_a_shift_that_the_bound_promises_is_seen() -> None:
    """Mass moved from one end of an order to the other: found in 95 of 100 samples or more, and
    in few where it is a third as large."""
    rng, n, alpha = np.random.default_rng(4), 1000, 1e-4
    shift = uniformity.detectable(n, alpha, MOST_TESTS)
    assert shift is not None and abs(uniformity.tokens_for(shift, alpha, MOST_TESTS) - n) < 30

    def share(moved: float) -> float:
        u = rng.random((100, n))
        late = (u > 0.5) & (rng.random(u.shape) < 2 * moved)  # total variation `moved`
        u = np.where(late, u - 0.5, u)
        return np.mean([uniformity.kolmogorov(row)[1] < alpha / MOST_TESTS for row in u])

    assert share(shift) >= 0.9 and share(shift / 3) < 0.2
    assert uniformity.detectable(5, alpha, MOST_TESTS) is None


# --- layers on a small target of the user's kind


@pytest.fixture(scope="module")
def small() -> tuple[CertifySetup, DraftModel]:
    target = Target(tiny_model(vocab=40, hidden=32, init_std=0.3))
    draft = Target(tiny_model(vocab=40, hidden=32, init_std=0.3, layers=1))
    # the first layer alone: a fair draft
    draft.model.load_state_dict(target.model.state_dict(), strict=False)
    prompts = [[3 + i, 5, 7 + 2 * i, 9] for i in range(6)]
    plan = CertificatePlan(ONE, 600, 40, 8, greedy_prompts=6, greedy_tokens=24)
    return dataclasses.replace(open_setup(target, prompts, plan), tie=1e-4), DraftModel(draft, 3)


def of(setup: CertifySetup, target: Target | None = None, **keys: Any) -> CertifySetup:
    """The same setup with other settings or a wrong target."""
    plan = dataclasses.replace(setup.plan, **keys)
    return dataclasses.replace(setup, plan=plan, target=target or setup.target)


@pytest.mark.parametrize(
    ("sampling", "guidance"),
    [(Sampling(0.8, top_p=0.9), None), (Sampling(1.0, repetition_penalty=1.3), 1.5)],
)
def test_emitted_tokens_are_uniform_under_the_distribution_of_plain_passes(
    small: Any, sampling: Sampling, guidance: float | None
) -> None:
    setup, drafter = small
    found = sampling_layer(of(setup, sampling=sampling, guidance=guidance), drafter)
    assert len(found.u) == 600 and not found.outside.any() and not found.mismatches
    assert found.drafted.mean() > 0.1 and len(found.tests()) <= MOST_TESTS
    assert found.p() > 1e-4


def test_wrong_rules_and_wrong_distributions_are_rejected(small: Any) -> None:
    setup, drafter = small
    typical = of(setup, rule=wrong_rules.typical_acceptance, tokens=1000)
    assert sampling_layer(typical, drafter).p() < 1e-6
    assert sampling_layer(of(setup, tokens=1000), ScoredSharper(drafter)).p() < 1e-6
    cut = of(setup, sampling=Sampling(0.8, top_k=3), rule=wrong_rules.bonus_unwarped)
    impossible = sampling_layer(cut, drafter)
    assert impossible.p() == 0 and "probability 0" in impossible.json(1e-4)["why"]


def test_the_strata_of_an_answer() -> None:
    """Prefill, then cycles of 3 proposed tokens of which 1, 0, 0, 3, 1 are accepted, and one
    without a draft."""
    accepted, made, start = (1, 0, 0, 3, 1, 0), list[Cycle](), 1
    for i, count in enumerate(accepted):
        made.append(Cycle(3 if i < 5 else 0, count, False, start))
        start += count + 1
    answer = Generation([1], list(range(start)), made, [False] * start)
    cycles, depths = sampled.cycles(answer)
    assert depths.tolist() == [0, 0, 1, 0, 0, 0, 1, 2, 3, 0, 1, 0]
    found = sampled.strata(answer, depths, cycles)
    places = {name: np.flatnonzero(found[:, g]).tolist() for g, name in enumerate(sampled.GROUPS)}
    assert places["all tokens"] == list(range(12)) and places["first of an answer"] == [0]
    assert places["first of a cycle"] == [1, 3, 4, 5, 9, 11]
    assert places["inside a draft"] == [2, 6, 7, 10] and places["bonus of a whole draft"] == [8]


def test_a_recorder_has_every_token_with_the_logits_that_a_plain_pass_gives() -> None:
    """It changes nothing, and a loop that emits something else is noticed."""
    prompts = {7: [1, 2, 3], 3: [4, 2], 11: [5, 5, 5, 1]}
    requests = [Request(prompt, 12, id=i) for i, prompt in prompts.items()]
    drafter, target = DraftModel(toy_model(seed=5, layers=1), 3), toy_model()
    run, lines = recorded(target, drafter, requests, CertificatePlan(ONE, 0, 0, 2))
    bare = generate(target, drafter, requests, ONE, batch_size=2)
    assert [g.token_ids for g in bare.generations] == [g.token_ids for g in run.generations]
    assert mismatches(lines, run) == 0 and sum(map(len, lines)) > 15
    for line, generation in zip(lines, run.generations, strict=True):
        ids, start = [*generation.prompt_ids, *generation.token_ids], len(generation.prompt_ids)
        with torch.no_grad():
            plain = target.model(torch.tensor([ids])).logits[0, start - 1 : -1]
        assert torch.allclose(plain, torch.stack([kept for _, kept in line]), atol=1e-9)
    run.generations[1].token_ids[4] ^= 1
    assert mismatches(lines, run) == 1


def test_greedy_layer_passes_sound_code_and_names_defects(small: Any) -> None:
    setup, drafter = small
    good = greedy_layer(setup, drafter)
    assert good["passed"] and not good["divergences"] and good["drafted_tokens"] > 0
    wrong = greedy_layer(of(setup, rule=wrong_rules.softmax_acceptance), drafter)
    assert wrong["defects"] > 0 and wrong["not_the_verifiers_best"] > 0
    tree = DraftModel(drafter.draft, Form.tree(2, nodes=6, width=2))
    assert greedy_layer(of(setup), tree)["passed"]
    for change, own in (
        (wrong_rules.leaks_siblings, tree),
        (wrong_rules.commits_wrong_rows, drafter),
    ):
        assert greedy_layer(of(setup, target=change(setup.target)), own)["defects"] > 0


def test_left_padding_of_the_reference_is_told_from_a_defect(small: Any) -> None:
    """An answer unlike a batched reference is compared with the reference alone."""
    setup, drafter = small
    padded = [*setup.references[:2], [t + 1 for t in setup.references[2]], *setup.references[3:]]
    found = greedy_layer(dataclasses.replace(of(setup), references=padded), drafter)
    assert found["divergences"] == []


def test_a_tie_within_rounding_is_no_defect() -> None:
    target = Target(tiny_model(vocab=40, hidden=32))
    request, plan = Request([3, 4, 5], 12), CertificatePlan(ONE, 0, 0, 1, greedy_prompts=0)
    setup = dataclasses.replace(open_setup(target, [[3, 4, 5]], plan), tie=1e-4)
    best, second = setup.plain.logits([3, 4, 5, 0], 3)[0].topk(2).indices.tolist()
    told = lambda ours: divergence(setup, request, ours, [best, 9])
    found = told([second, 9])
    assert found["kind"] == "defect" and found["margin"] > 1e-4 and found["position"] == 0
    early = told([best])  # stopped too early
    assert early["kind"] == "defect" and early["position"] == 1 and early["margin"] is None
    with torch.no_grad():
        target.model.lm_head.weight[second] = target.model.lm_head.weight[best]  # now the two tie
    assert told([second, 9])["kind"] == "rounding tie"


# --- verdict and command

GOOD = {"name": "sampling", "passed": True, "why": "", "cycles_with_a_draft": 500}
CAUGHT = {"name": "x", "layer": "greedy", "rejected": True}
BOUND = {"tokens": 5000, "enough": True}


def test_verdict_has_three_values() -> None:
    def decided(layer: dict[str, Any], control: dict[str, Any], bound: dict[str, Any]) -> str:
        return layers.verdict([layer], [CAUGHT, control], bound)[0]

    missed = {**CAUGHT, "rejected": False}
    assert decided(GOOD, CAUGHT, BOUND) == "lossless"
    assert decided({**GOOD, "passed": False, "why": "off"}, missed, BOUND) == "not lossless"
    assert decided(GOOD, missed, BOUND) == "undecided"
    assert decided(GOOD, CAUGHT, {**BOUND, "enough": False}) == "undecided"
    assert decided({**GOOD, "cycles_with_a_draft": 3}, CAUGHT, BOUND) == "undecided"
    greedy = {"name": "greedy", "passed": True, "cycles_with_a_draft": 1}
    assert decided(greedy, CAUGHT, layers.bound([greedy], 1e-4, 0.1)) == "lossless"


def test_a_layer_that_could_not_run_is_not_passed(small: Any) -> None:
    """Too few tokens for one test; a drafter that never drafted."""
    setup, drafter = small
    sample = sampling_layer(of(setup, tokens=100), drafter).json(1e-4)
    assert sample["tests"] == [] and not sample["passed"]
    seen = {"tokens": 100, "enough": True}
    assert layers.verdict([{**sample, "cycles_with_a_draft": 500}], [], seen)[0] == "undecided"
    silent = greedy_layer(setup, NoDraft())
    assert layers.verdict([silent], [], layers.bound([silent], 1e-4, 0.1))[0] == "undecided"


TINY = ("target=tiny", "target.hidden=32", "target.init_std=0.3", "cases=5", "greedy_prompts=2")
TINY += ("greedy_tokens=8", "tokens=400", "max_new_tokens=32", "detect=0.9", "quiet=true")


def command(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code, path = code_of(certify.main, *TINY, f"out={out}", *more), out / "certificate.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


def test_command_writes_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, found = command(tmp_path / "c", "drafter=ngram", "temperature=1", "tokens=1200")
    assert (code, found["verdict"]) == (0, "lossless"), found["reasons"]
    said = capsys.readouterr().out
    assert said.startswith("LOSSLESS: ngram on tiny-llama") and found["bound"]["said"] in said
    assert [x["name"] for x in found["layers"]] == ["exact", "greedy", "sampling"]
    negative = {c["layer"]: c["rejected"] for c in found["negative_controls"]}
    assert negative == {"exact": True, "greedy": True, "sampling": True}
    assert found["format"] == 4 and found["bound"]["tokens"] == 1200
    assert 0.05 < found["bound"]["shift"] < 0.12
    assert len(found["identities"]["target"]["weights_sha256"]) == 64
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["certificate.json"]


def test_command_at_temperature_zero(tmp_path: Path) -> None:
    code, found = command(tmp_path / "a", "drafter=ngram", "temperature=0")
    assert (code, found["verdict"]) == (0, "lossless") and found["bound"]["tokens"] == 0
    assert [c["layer"] for c in found["negative_controls"]] == ["exact", "greedy"]


def test_command_finds_a_broken_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: Any = {"cases": 40, "greedy_prompts": 2, "greedy_tokens": 8}
    wrong = CertificatePlan(Sampling(0.0), 1, 1, 1, **keys, rule=wrong_rules.rejected_token_stays)
    monkeypatch.setattr(certify.CertifyConfig, "plan", lambda cfg: wrong)
    code, found = command(tmp_path / "c", "drafter=none", "temperature=0")
    assert (code, found["verdict"]) == (1, "not lossless")
    assert found["reasons"][0].startswith("layer exact: output distribution off by")
