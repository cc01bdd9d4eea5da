"""The layers of a losslessness certificate, run one after another, and the verdict they add up to.

exact       every branch of the verification rule on random toy worlds, half of them under the user's own sampling
            settings, and of the whole decode loop on a toy model
greedy      token equality with Hugging Face `generate` at T = 0 on the user's target and drafter
sampling    every emitted token placed in the law of an independent plain pass (T > 0)
controls    known wrong code through the same layers: each must fail

"not lossless" when a layer fails; "undecided" when none does but a control got through, or the sample could have missed
a bias above `detect`, or hardly met a draft; "lossless" otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.drafters import Drafter, DraftModel
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, TreeShape
from scripts.lib import pit, wrong_drafters, wrong_rules
from scripts.lib.controls import Mangled, commits_wrong_rows, controls, rule_named
from scripts.lib.engine_law import TableDrafter, engine_law, toy_model
from scripts.lib.enumerator import Case, enumerate_case
from scripts.lib.live import Greedy, Plain, Sample, greedy_layer, reference_tokens, sampling_layer

CASE_LIMIT, LOOP_LIMIT = 1e-12, 1e-9
FEWEST_DRAFTS = 100  # cycles with a draft below which a sample says little about a drafter
CONTROL_P = 1e-6  # a control is stopped early once its p falls below
ENOUGH_DRAFTED = 0.1  # share of drafted tokens from which on the user's drafter serves the sampling controls
Watch = Callable[[str, int, int], None]  # what is running, done, total


@dataclass(frozen=True)
class Plan:
    """How much to run; the keys of scripts/certify.py say what each means."""

    sampling: Sampling
    verify: str
    tokens: int
    max_new_tokens: int
    batch_size: int
    cases: int
    greedy_prompts: int
    greedy_tokens: int
    alpha: float
    detect: float
    seed: int


@dataclass
class Findings:
    """What was found, as certificate.json holds it."""

    layers: list[dict[str, Any]] = field(default_factory=list)
    controls: list[dict[str, Any]] = field(default_factory=list)
    power: dict[str, Any] = field(default_factory=dict)
    verdict: str = "undecided"
    reasons: list[str] = field(default_factory=list)


def run(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], plan: Plan,
        watch: Watch) -> Findings:  # fmt: skip
    """Every layer and control."""
    found = Findings()
    found.layers.append(exact_layer(plan, watch))
    target.probe()
    plain = Plain(target)
    few = list(prompts[: min(4, len(prompts))])
    noise = plain.rounding(few)
    slack = 4 * noise
    chosen = [prompts[i % len(prompts)] for i in range(min(plan.greedy_prompts, len(prompts)))]
    theirs = _reference(plain, chosen, plan, watch)
    tick = _ticker(watch, "greedy", len(chosen))
    greedy = greedy_layer(plain, target, drafter, chosen, plan.greedy_tokens, plan.batch_size, plan.verify, slack,
                          plan.sampling.repetition_penalty, theirs, tick)  # fmt: skip
    found.layers.append(_greedy_json(greedy, noise, slack))
    if plan.sampling.greedy:
        found.power = {"tokens": 0, "alpha": plan.alpha, "min_detectable": None, "reason": "T = 0 has no law to sample"}
    else:
        _sampling(found, plain, target, drafter, prompts, plan, slack, watch)
    _static_controls(found, watch)
    _greedy_controls(found, plain, target, chosen, plan, slack, theirs, watch)
    found.verdict, found.reasons = verdict(found.layers, found.controls, found.power, plan.detect)
    return found


def verdict(layers: Sequence[dict[str, Any]], negative: Sequence[dict[str, Any]], power: dict[str, Any],
            detect: float) -> tuple[str, list[str]]:  # fmt: skip
    """The three-valued verdict and its reasons, from what certificate.json holds."""
    failed = [f"layer {layer['name']}: {layer['why']}" for layer in layers if not layer["passed"]]
    if failed:
        return "not lossless", failed
    open_points = [f"control not rejected by layer {c['layer']}: {c['name']}" for c in negative if not c["rejected"]]
    if not negative:
        open_points.append("no negative control was run")
    least = power.get("min_detectable")
    if power.get("tokens") and (least is None or not least <= detect):
        words = "any bias" if least is None else f"a bias of {least:.3f}"
        open_points.append(
            f"{power['tokens']} tokens could miss {words} (total variation), more than detect={detect}; "
            "set tokens higher"
        )
    drafts = power.get("cycles_with_a_draft")
    if drafts is not None and drafts < FEWEST_DRAFTS:
        open_points.append(f"the drafter proposed something in {drafts} cycles only, fewer than {FEWEST_DRAFTS}; "
                           "set tokens higher, or take prompts that it has something to say about")  # fmt: skip
    return ("undecided", open_points) if open_points else ("lossless", [])


# --- exact


def exact_layer(plan: Plan, watch: Watch) -> dict[str, Any]:
    """Random toy worlds, half of them under the user's sampling settings, and the whole loop on toy models."""
    rule, generator = rule_named(plan.verify), torch.Generator().manual_seed(plan.seed)
    worst = loop = 0.0
    leaves = 0
    for i in range(plan.cases):
        case = Case.random(generator)
        if i % 2:
            case = dataclasses.replace(case, sampling=_toy_settings(plan.sampling, case.vocab))
        outcome = enumerate_case(case, rule)
        worst, leaves = max(worst, outcome.error), leaves + outcome.leaves
        watch("exact", i + 1, plan.cases)
    tree = TreeShape.of([(0,), (1,), (0, 0)])
    toys: list[tuple[Any, TreeShape | None]] = [(DraftModel(toy_model(seed=5, layers=1), 2), None)]
    toys += [(TableDrafter(tree, scheme, 8), tree) for scheme in ("top", "iid", "without", "hybrid")]
    for toy, shape in toys:
        target = toy_model()
        settings = _toy_settings(plan.sampling, 8)
        settings = dataclasses.replace(settings, repetition_penalty=plan.sampling.repetition_penalty)
        loop = max(loop, engine_law(target, toy, [3, 1, 4], 3, settings, plan.verify, shape).error)
    passed = worst <= CASE_LIMIT and loop <= LOOP_LIMIT
    return {
        "name": "exact", "passed": passed, "cases": plan.cases, "branches": leaves, "max_error": worst,
        "limit": CASE_LIMIT, "loop_max_error": loop, "loop_limit": LOOP_LIMIT, "verify": plan.verify,
        "why": "" if passed else f"output law off by {max(worst, loop):.3g}",
    }  # fmt: skip


def _toy_settings(s: Sampling, vocab: int) -> Sampling:
    """The user's settings where a toy vocabulary can have them, without history."""
    return Sampling(s.temperature, min(s.top_k, vocab), s.top_p, s.min_p)


# --- greedy


def _reference(plain: Plain, prompts: Sequence[Sequence[int]], plan: Plan, watch: Watch) -> list[list[int]]:
    from decode.engine import Request

    sampling = Sampling(0.0, repetition_penalty=plan.sampling.repetition_penalty)
    out = []
    for i, prompt in enumerate(prompts):
        watch("reference", i, len(prompts))
        out += reference_tokens(plain, [Request(list(prompt), plan.greedy_tokens, id=i)], sampling)
    watch("reference", len(prompts), len(prompts))
    return out


def _greedy_json(greedy: Greedy, noise: float, tolerance: float) -> dict[str, Any]:
    ties = len(greedy.divergences) - greedy.defects
    why = f"{greedy.defects} of {greedy.prompts} outputs differ from generate beyond rounding" if greedy.defects else ""
    return {
        "name": "greedy", "passed": greedy.defects == 0, "why": why, "prompts": greedy.prompts, "tokens": greedy.tokens,
        "drafted_tokens": greedy.accepted, "rounding_ties": ties, "defects": greedy.defects, "rounding": noise,
        "tie_margin": tolerance, "divergences": greedy.divergences[:50],
    }  # fmt: skip


def _ticker(watch: Watch, name: str, total: int) -> Callable[[int], None]:
    done = 0

    def tick(n: int) -> None:
        nonlocal done
        done = min(done + n, total)
        watch(name, done, total)

    return tick


# --- sampling


def _sampling(found: Findings, plain: Plain, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]],
              plan: Plan, slack: float, watch: Watch) -> None:  # fmt: skip
    def sample(name: str, who: Any, verify: Any, stop: Any = None) -> Sample:
        watch(name, 0, plan.tokens)
        return sampling_layer(plain, target, who, prompts, plan.sampling, plan.tokens, plan.max_new_tokens,
                              plan.batch_size, plan.seed, verify, slack, stop,
                              lambda done: watch(name, done, plan.tokens))  # fmt: skip

    recorder = Recorder(drafter)
    own = sample("sampling", recorder, plan.verify)
    layer = sampling_json(own, plan.alpha)
    found.layers.append(layer)
    biases = pit.detectable(own.top, len(own.u), plan.alpha, max(len(layer["tests"]), 1))
    least = max(biases.values())
    found.power = {
        "tokens": len(own.u), "alpha": plan.alpha, "power": 0.99,
        "cycles_with_a_draft": own.proposals if drafter.max_depth else None,
        "min_detectable": least if math.isfinite(least) else None,
        "measure": "mean total variation between the emitted and the target's law",
        "by_bias": {k: v if math.isfinite(v) else None for k, v in biases.items()},
    }  # fmt: skip
    helper = DraftModel(target, 3, "the target itself")
    much = own.drafted >= ENOUGH_DRAFTED
    typical: Any = drafter if much else helper
    mislaid: Any = drafter if much and recorder.sampled else helper
    for name, who, verify in (
        ("typical acceptance", typical, wrong_rules.typical_acceptance),
        ("draft scored with the wrong law", Mangled(mislaid, wrong_drafters.scored_unwarped), plan.verify),
    ):
        bad = sample(f"control: {name}", who, verify, lambda s: _p(s) < CONTROL_P)
        found.controls.append(
            {"name": name, "layer": "sampling", "rejected": _p(bad) < plan.alpha or bad.outside > bad.edge,
             "p": _p(bad), "tokens": len(bad.u), "drafter": who.name}
        )  # fmt: skip


class Recorder:
    """Notes whether a drafter's trees hold sampled nodes."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner, self.sampled = drafter, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = self.inner.propose(budget, sampling, rng)
        self.sampled = self.sampled or (tree.sampled is not None and bool(tree.sampled.any()))
        return tree


def _p(sample: Sample) -> float:
    return pit.overall(sample.tests())


def sampling_json(sample: Sample, alpha: float) -> dict[str, Any]:
    """The sampling layer's entry of certificate.json."""
    tests = sample.tests()
    p, impossible = pit.overall(tests), sample.outside - sample.edge
    why = ""
    if impossible:
        why = f"{impossible} emitted tokens have probability 0 under the target's law"
    elif p < alpha:
        worst = min(tests, key=lambda t: t.p)
        why = f"{worst.name} of {worst.stratum}: p = {worst.p:.3g}, all tests together {p:.3g} < alpha = {alpha:g}"
    return {
        "name": "sampling", "passed": not why, "why": why, "tokens": len(sample.u), "alpha": alpha, "p": p,
        "tests": [dataclasses.asdict(t) for t in tests], "drafted_share": sample.drafted,
        "cycles_with_a_draft": sample.proposals,
        "outside_the_law": sample.outside, "of_these_at_the_edge_within_rounding": sample.edge,
        "histograms": {k: np.histogram(v, pit.CELLS, (0, 1))[0].tolist() for k, v in sample.strata().items()},
        "distribution": [round(float((sample.u <= x).mean()), 6) for x in np.linspace(0, 1, 101)],
    }  # fmt: skip


# --- controls


def _static_controls(found: Findings, watch: Watch) -> None:
    known = controls()
    for i, control in enumerate(known):
        watch("controls", i, len(known))
        wrong, right = control.wrong(), control.right()
        found.controls.append(
            {"name": control.name, "layer": control.layer, "rejected": wrong > control.limit >= right, "p": None,
             "measured": wrong, "correct_code": right, "limit": control.limit, "seen": control.seen}
        )  # fmt: skip
    watch("controls", len(known), len(known))


def _greedy_controls(found: Findings, plain: Plain, target: Target, prompts: Sequence[Sequence[int]], plan: Plan,
                     slack: float, theirs: list[list[int]], watch: Watch) -> None:  # fmt: skip
    few = prompts[:4]
    for name, who, verify in (
        ("softmax acceptance at T = 0", target, wrong_rules.softmax_acceptance),
        ("cache keeps the wrong rows", commits_wrong_rows(target), plan.verify),
    ):
        watch(f"control: {name}", 0, 1)
        helper = DraftModel(target, 3, "the target itself")
        bad = greedy_layer(plain, who, helper, few, plan.greedy_tokens, plan.batch_size, verify, slack,
                           plan.sampling.repetition_penalty, theirs[: len(few)])  # fmt: skip
        found.controls.append(
            {"name": name, "layer": "greedy", "rejected": bad.defects > 0, "p": None, "defects": bad.defects,
             "prompts": bad.prompts, "drafter": helper.name}
        )  # fmt: skip
        watch(f"control: {name}", 1, 1)
