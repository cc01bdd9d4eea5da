"""The layers of a losslessness certificate, run one after another, and the verdict they add up
to.

exact       every branch of the verification rule on random toy worlds, half of them under the
            user's own sampling settings, and of the whole decode loop on a toy model
greedy      token equality with Hugging Face `generate` at T = 0 on the user's target and
            drafter, and every token against the very logits it was verified with
sampling    every emitted token placed in the distribution of the logits it was verified with
(T > 0)
passes      these distributions against those of plain decoding
controls    wrong code through the same layers: each must be rejected (controls.py)

"not lossless" when a layer fails; "undecided" when none does but a control got through, or the
sample could have missed a shift of `detect` (detection.py), or hardly met a draft; "lossless"
otherwise.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import TreeShape
from outrider.scripts.certificate import detection, passes, uniformity
from outrider.scripts.certificate.engine_distribution import (
    TableDrafter,
    engine_distribution,
    toy_model,
)
from outrider.scripts.certificate.enumerator import SCHEMES, Case, enumerate_case
from outrider.scripts.certificate.greedy import (
    Greedy,
    GreedyReading,
    greedy_layer,
    greedy_of,
    reference_tokens,
)
from outrider.scripts.certificate.recorder import rule_of
from outrider.scripts.certificate.sampled import MOST_TESTS, Sample, Setting, sampling_layer
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, named
from outrider.scripts.scoring.plain import Plain

CASE_LIMIT, LOOP_LIMIT = 1e-12, 1e-9
SAFETY = 4  # rounding is measured on a few prompts only
FEWEST_DRAFTS = 100  # cycles with a draft below which a sample says little about a drafter


@dataclass(frozen=True, kw_only=True)
class CertificatePlan(Setting):
    """How much to run: keys of scripts/certify.py. guidance: None when off."""

    cases: int
    greedy_prompts: int
    greedy_tokens: int
    alpha: float

    def reading(self, tie: float) -> GreedyReading:
        """The greedy layer's. tie: see World."""
        return GreedyReading(
            self.greedy_tokens, self.batch_size, tie, self.verify, self.sampling, self.guidance
        )


@dataclass
class World:
    """What every layer on the user's own target works with. noise: see Plain.rounding; tie:
    largest difference of a token's distance to the best one that counts as rounding; theirs:
    the reference's greedy tokens for the prompts `chosen`; memo: what was found so far; pace:
    seconds for one of these tokens, None where an earlier run wrote them."""

    target: Target
    plain: Plain
    plan: CertificatePlan
    memo: Memo
    on_progress: OnProgress
    prompts: Sequence[Sequence[int]]
    chosen: list[Sequence[int]]
    noise: dict[str, float]
    tie: float
    theirs: list[list[int]]
    pace: float | None = None


def open_world(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plan: CertificatePlan,
    on_progress: OnProgress,
    memo: Memo,
) -> World:
    """Measure rounding and let the reference write its greedy answers."""
    target.probe()
    plain = Plain(target)
    noise = memo.once("noise", lambda: plain.rounding(list(prompts[:4])))
    spread = 1.0 if plan.guidance is None else abs(plan.guidance) + abs(1 - plan.guidance)
    chosen = [prompts[i % len(prompts)] for i in range(plan.greedy_prompts)]
    requested = [Request(list(p), plan.greedy_tokens, id=i) for i, p in enumerate(chosen)]
    how = (greedy_of(plan.sampling), plan.batch_size, plan.guidance)
    known, begin = len(memo.lines("reference")), time.perf_counter()
    theirs = reference_tokens(plain, requested, *how, named(on_progress, "reference"), memo)
    fresh = sum(len(tokens) for tokens in theirs[known:])
    pace = (time.perf_counter() - begin) / fresh if fresh else None
    tie = SAFETY * noise["gap"] * spread
    return World(target, plain, plan, memo, on_progress, prompts, chosen, noise, tie, theirs, pace)


def layers(world: World, drafter: Drafter) -> list[dict[str, Any]]:
    """The layers of this drafter and these settings, as certificate.json holds them."""
    plain, target, plan, memo = world.plain, world.target, world.plan, world.memo
    found = [memo.once("exact", lambda: exact_layer(plan, world.on_progress))]
    how, written = plan.reading(world.tie), named(world.on_progress, "greedy")
    greedy = greedy_layer(plain, target, drafter, world.chosen, how, world.theirs, written, memo)
    found.append(_greedy_json(greedy, world.noise["gap"], world.tie))
    if plan.sampling.greedy:
        return found
    drawn = named(world.on_progress, "sampling")
    own = sampling_layer(plain, target, drafter, world.prompts, plan, None, drawn, memo)
    return [*found, sampling_json(own, plan.alpha), passes_layer(world, own)]


def passes_layer(world: World, own: Sample) -> dict[str, Any]:
    """The verifier's distributions beside those of plain decoding, by place in the cycle."""
    some, how = own.texts[: passes.TEXTS], (world.plan.sampling, world.plan.guidance)
    plainly = world.memo.once("plainly", lambda: passes.yardstick(world.plain, some, *how))
    first = np.r_[True, own.sequence[1:] != own.sequence[:-1]]
    return passes.passes_json(own.depth, first, own.passes, plainly)


def bound(layers: Sequence[dict[str, Any]], alpha: float, detect: float) -> dict[str, Any]:
    """What the sample is sure to see, and whether that is enough: all of `detect` and beyond.
    tokens 0 where none was drawn."""
    own = next((layer for layer in layers if layer["name"] == "sampling"), None)
    if own is None:
        said = "T = 0 has no distribution to sample"
        return {"tokens": 0, "shift": None, "enough": True, "said": said}
    shift = detection.detectable(own["tokens"], alpha, MOST_TESTS)
    return {
        "tokens": own["tokens"],
        "alpha": alpha,
        "probability": detection.SURE,
        "shift": shift,
        "enough": detection.seen(own["tokens"], detect, alpha, MOST_TESTS) >= detection.SURE,
        "said": detection.said(own["tokens"], shift),
    }


def verdict(
    layers: Sequence[dict[str, Any]],
    negative: Sequence[dict[str, Any]],
    known: dict[str, Any],
    drafts: bool = True,
) -> tuple[str, list[str]]:
    """The three-valued verdict and its reasons, from what certificate.json holds. known: `bound`.
    drafts: the drafter drafts at all."""
    failed = [f"layer {layer['name']}: {layer['why']}" for layer in layers if not layer["passed"]]
    if failed:
        return "not lossless", failed
    missed = [c for c in negative if not c["rejected"]]
    open_points = [f"control not rejected by layer {c['layer']}: {c['name']}" for c in missed]
    if not known["enough"]:
        open_points.append(f"{known['tokens']} tokens are too few for `detect`; set tokens higher")
    for layer in layers if drafts else ():
        if layer.get("cycles_with_a_draft", FEWEST_DRAFTS) < FEWEST_DRAFTS:
            open_points.append(
                f"the drafter proposed something in {layer['cycles_with_a_draft']} cycles only, "
                f"fewer than {FEWEST_DRAFTS}; set tokens higher, or take prompts that it has "
                "something to say about"
            )
    return ("undecided", open_points) if open_points else ("lossless", [])


# --- exact


def exact_layer(plan: CertificatePlan, on_progress: OnProgress) -> dict[str, Any]:
    """Random toy worlds, half of them under the user's sampling settings, and the whole loop on
    toy models.
    """
    rule, generator = rule_of(plan.verify), torch.Generator().manual_seed(plan.seed)
    worst, leaves = 0.0, 0
    for i in range(plan.cases):
        case = Case.random(generator)
        if i % 2:
            case = dataclasses.replace(case, sampling=_toy_settings(plan.sampling, case.vocab))
        outcome = enumerate_case(case, rule)
        worst, leaves = max(worst, outcome.error), leaves + outcome.leaves
        on_progress(i + 1, plan.cases, "exact")
    loop = max(_loop_errors(plan))
    passed = worst <= CASE_LIMIT and loop <= LOOP_LIMIT
    return {
        "name": "exact",
        "passed": passed,
        "cases": plan.cases,
        "branches": leaves,
        "max_error": worst,
        "limit": CASE_LIMIT,
        "loop_max_error": loop,
        "loop_limit": LOOP_LIMIT,
        "verify": plan.verify,
        "why": "" if passed else f"output distribution off by {max(worst, loop):.3g}",
    }


def _loop_errors(plan: CertificatePlan) -> Iterator[float]:
    """Of the whole loop under the user's settings: a draft model, and trees of every scheme."""
    tree = TreeShape.of([(0,), (1,), (0, 0)])
    toys: list[tuple[Any, TreeShape | None]] = [(DraftModel(toy_model(seed=5, layers=1), 2), None)]
    toys += [(TableDrafter(tree, scheme, 8), tree) for scheme in SCHEMES]
    penalty = plan.sampling.repetition_penalty
    how = dataclasses.replace(_toy_settings(plan.sampling, 8), repetition_penalty=penalty)
    for toy, shape in toys:
        target = toy_model()
        distribution = engine_distribution(
            target, toy, [3, 1, 4], 3, how, plan.verify, shape, plan.guidance
        )
        yield distribution.error


def _toy_settings(s: Sampling, vocab: int) -> Sampling:
    """The user's settings for a toy vocabulary, without the repetition penalty."""
    return Sampling(s.temperature, min(s.top_k, vocab), s.top_p, s.min_p)


# --- as certificate.json holds them


def _greedy_json(greedy: Greedy, noise: float, tolerance: float) -> dict[str, Any]:
    ties = len(greedy.divergences) - greedy.defects
    why = ""
    if greedy.defects:
        why = f"{greedy.defects} of {greedy.prompts} outputs differ from generate beyond rounding"
    if greedy.astray:
        why = (
            f"{greedy.astray} emitted tokens are not the best one of the logits they "
            "were verified against"
        )
    return {
        "name": "greedy",
        "passed": not why,
        "why": why,
        "prompts": greedy.prompts,
        "tokens": greedy.tokens,
        "drafted_tokens": greedy.accepted,
        "rounding_ties": ties,
        "defects": greedy.defects,
        "not_the_verifiers_best": greedy.astray,
        "rounding": noise,
        "tie_margin": tolerance,
        "divergences": greedy.divergences[:50],
    }


def sampling_json(sample: Sample, alpha: float) -> dict[str, Any]:
    """The sampling layer's entry of certificate.json."""
    tests = sorted(sample.tests(), key=lambda t: t.p)
    p = uniformity.overall(tests)
    if sample.astray:
        why = f"{sample.astray} answers hold other tokens than verification chose"
    elif sample.outside:
        why = (
            f"{sample.outside} emitted tokens have probability 0 under the distribution they were "
            "verified against"
        )
    else:
        why = uniformity.objection(tests, alpha)
    return {
        "name": "sampling",
        "passed": not why,
        "why": why,
        "tokens": len(sample.u),
        "alpha": alpha,
        "p": p,
        "tests": [dataclasses.asdict(t) for t in tests],
        "drafted_share": sample.drafted,
        "cycles_with_a_draft": sample.proposals,
        "outside_the_law": sample.outside,
        "at_the_edge_within_rounding": sample.edge,
        "expected_there": sample.edge_mass,
    }
