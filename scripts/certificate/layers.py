"""The layers of a losslessness certificate, one after another, and the verdict they add up to.

exact       every branch of the accept rule on random small models, half of them under the user's
            own sampling settings
greedy      token equality with Hugging Face `generate` at T = 0 on the user's target and
            drafter, and every token against the very logits it was verified with
sampling    every emitted token placed in the distribution of the logits it was verified with
            (T > 0)
controls    wrong code through the same layers: each must be rejected (controls.py)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from outrider.decode.drafters import Drafter
from outrider.decode.sampling import Sampling
from outrider.scripts.certificate import uniformity
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from outrider.scripts.certificate.greedy import greedy_layer
from outrider.scripts.certificate.sampled import MOST_TESTS, sampling_layer
from outrider.scripts.certificate.setup import CertificatePlan, CertifySetup
from outrider.scripts.common.progress import OnProgress

CASE_LIMIT = 1e-12
# cycles with a draft below which the last layer says little about a drafter
FEWEST_DRAFTS = {"sampling": 100, "greedy": 1}


def run_layers(setup: CertifySetup, drafter: Drafter) -> list[dict[str, Any]]:
    """Return the layers of this drafter and these settings, as certificate.json holds them."""
    plan = setup.plan
    found = [exact_layer(plan, setup.on_progress), greedy_layer(setup, drafter)]
    if plan.sampling.greedy:
        return found
    return [*found, sampling_layer(setup, drafter).json(plan.alpha)]


def exact_layer(plan: CertificatePlan, on_progress: OnProgress) -> dict[str, Any]:
    """Random small models, half of them under the user's sampling settings, without the
    repetition penalty."""
    generator, mine = torch.Generator().manual_seed(plan.seed), plan.sampling
    worst, leaves = 0.0, 0
    for i in range(plan.cases):
        case = Case.random(generator)
        if i % 2:
            top_k = min(mine.top_k, case.vocab)
            own = Sampling(mine.temperature, top_k, mine.top_p, mine.min_p)
            case = dataclasses.replace(case, sampling=own)
        outcome = enumerate_case(case, plan.rule)
        worst, leaves = max(worst, outcome.error), leaves + outcome.leaves
        on_progress(i + 1, plan.cases, "exact")
    passed = worst <= CASE_LIMIT
    return {
        "name": "exact",
        "passed": passed,
        "cases": plan.cases,
        "branches": leaves,
        "max_error": worst,
        "limit": CASE_LIMIT,
        "why": "" if passed else f"output distribution off by {worst:.3g}",
    }


def bound(layers: Sequence[dict[str, Any]], alpha: float, detect: float) -> dict[str, Any]:
    """Return what the sample is sure to see, and whether that is enough: all of `detect`
    and beyond. tokens 0 where none was drawn."""
    sample = next((layer for layer in layers if layer["name"] == "sampling"), None)
    if sample is None:
        said = "T = 0 has no distribution to sample"
        return {"tokens": 0, "shift": None, "enough": True, "said": said}
    tokens = sample["tokens"]
    shift = uniformity.detectable(tokens, alpha, MOST_TESTS)
    said = f"with {tokens:,} tokens no shift is sure to be seen"
    if shift is not None:
        said = (
            f"with {tokens:,} tokens a shift of total variation {shift:.3f} or more, towards "
            "likelier or rarer tokens or along the ids, is seen with probability "
            f"{uniformity.SURE:g}"
        )
    enough = tokens >= uniformity.tokens_for(detect, alpha, MOST_TESTS)
    return {"tokens": tokens, "alpha": alpha, "shift": shift, "enough": enough, "said": said}


def verdict(
    layers: Sequence[dict[str, Any]],
    controls: Sequence[dict[str, Any]],
    bound: dict[str, Any],
    drafts: bool = True,
) -> tuple[str, list[str]]:
    """Return the three-valued verdict and its reasons, from what certificate.json holds:
    "not lossless" when a layer fails; "undecided" when none does but one could not run, or a
    control got through, or the sample could have missed a shift of `detect`, or the last layer
    hardly met a draft; "lossless" otherwise. drafts: the drafter drafts at all."""
    failed = [layer for layer in layers if layer["passed"] is False]
    if failed:
        return "not lossless", [f"layer {layer['name']}: {layer['why']}" for layer in failed]
    idle = [layer["name"] for layer in layers if layer["passed"] is None]
    missed = [c for c in controls if not c["rejected"]]
    open_points = [
        f"layer {name} had too few tokens for one test; set tokens higher" for name in idle
    ]
    open_points += [f"control not rejected by layer {c['layer']}: {c['name']}" for c in missed]
    if not bound["enough"]:
        open_points.append(f"{bound['tokens']} tokens are too few for `detect`; set tokens higher")
    last = layers[-1]
    fewest = FEWEST_DRAFTS[last["name"]]
    if drafts and last["cycles_with_a_draft"] < fewest:
        open_points.append(
            f"the drafter proposed something in {last['cycles_with_a_draft']} cycles only, fewer "
            f"than {fewest}; set tokens higher, or take prompts where it proposes drafts"
        )
    return ("undecided", open_points) if open_points else ("lossless", [])
