"""Three pieces of wrong code that a certificate runs through its own layers: each must be rejected
there, else nothing shows that the layers see anything.

They do not depend on the drafter: what needs a draft takes the target as its own draft model. Every
draft here is a chain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.decode.adaptive import Wrapped
from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Rule
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.verify import Coins, Verdict
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from outrider.scripts.certificate.greedy import greedy_layer
from outrider.scripts.certificate.layers import CASE_LIMIT
from outrider.scripts.certificate.sampled import sampling_layer
from outrider.scripts.certificate.setup import CertifySetup

ENOUGH = 1e-6  # a sample is stopped early once its p falls below
WARM = 1.0  # at a lower temperature next to nothing is left to chance, and nothing to see
DRAFTED = 3  # tokens of a draft


def run_controls(setup: CertifySetup) -> list[dict[str, Any]]:
    """Return what came of each, as certificate.json holds it; at T = 0 nothing is sampled."""
    found = [_exact(setup.plan.rule), _greedy(setup)]
    return found if setup.plan.sampling.greedy else [*found, _sampling(setup)]


def _exact(rule: Rule) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tables = torch.randn(2, 4**3, 3, dtype=torch.float64, generator=generator)
    case = Case(3, TreeShape.chain(2), "iid", Sampling(1.0), *tables)
    error = enumerate_case(case, without_residual(rule)).error
    return {
        "name": "a rejected token's place is filled from the whole distribution",
        "layer": "exact",
        "rejected": error > CASE_LIMIT,
        "evidence": f"output distribution off by {error:.2g}",
    }


def _greedy(setup: CertifySetup) -> dict[str, Any]:
    wrong = replace(setup, plan=replace(setup.plan, rule=bonus_from_the_draft(setup.plan.rule)))
    bad = greedy_layer(wrong, DraftModel(setup.target, DRAFTED), "control: greedy")
    return {
        "name": "the bonus token is the draft's last one",
        "layer": "greedy",
        "rejected": not bad["passed"],
        "evidence": f"{bad['defects']} of {bad['prompts']} outputs differ, "
        f"{bad['not_the_verifiers_best']} tokens not the verifier's best",
    }


def _sampling(setup: CertifySetup) -> dict[str, Any]:
    alpha, sampling = setup.plan.alpha, setup.plan.sampling
    warm = max(sampling.temperature, WARM)
    setup = replace(setup, plan=replace(setup.plan, sampling=replace(sampling, temperature=warm)))
    drafter: Any = ScoredSharper(DraftModel(setup.target, DRAFTED))
    stop = lambda sample: sample.p() < min(ENOUGH, alpha)
    bad = sampling_layer(setup, drafter, stop, "control: sampling")
    p = bad.p()
    return {
        "name": "the draft is scored with another distribution than it was drawn from",
        "layer": "sampling",
        "rejected": p < alpha,
        "evidence": f"p = {p:.2g} after {len(bad.u):,} tokens at temperature {warm:g}",
    }


def without_residual(rule: Rule) -> Rule:
    """Behind a rejection the token is drawn from the target's whole distribution."""

    def wrong(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        verdict = rule(tree, distribution, rng)
        rows = torch.arange(len(verdict.length), device=verdict.length.device)
        p = distribution.at(rows, verdict.length).dense(distribution.vocab_size)
        whole = rng.draw(p, rows, verdict.length - 1)
        rejected = verdict.length < tree.size
        return replace(verdict, bonus=torch.where(rejected, whole, verdict.bonus))

    return wrong


def bonus_from_the_draft(rule: Rule) -> Rule:
    """Behind a draft that was accepted whole its last token comes once more."""

    def wrong(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        verdict = rule(tree, distribution, rng)
        if not tree.width:
            return verdict
        last = tree.tokens.gather(1, (verdict.length - 1).clamp(min=0)[:, None])[:, 0]
        whole = (verdict.length > 0) & (verdict.length == tree.size)
        return replace(verdict, bonus=torch.where(whole, last, verdict.bonus))

    return wrong


class ScoredSharper(Wrapped):
    """Says that its drafts were drawn from the square of the distribution that they were."""

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        tree = self.inner.propose(budget, sampling, rng)
        if tree.proposal is None:
            return tree
        weights = tree.proposal.probs.square()
        claimed = weights / weights.sum(-1, keepdim=True)
        return replace(tree, proposal=replace(tree.proposal, probs=claimed))
