"""Three pieces of wrong code that a certificate runs through its own layers: each must be rejected
there, else nothing shows that the layers see anything.

They do not depend on the drafter: what needs a draft takes the target as its own draft model.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from outrider.decode.draft_model import DraftModel
from outrider.decode.engine import Rule
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution, Sampling
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.verify import Coins, Verdict
from outrider.decode.wrapped import Wrapped
from outrider.scripts.certificate import layers, uniformity
from outrider.scripts.certificate.enumerator import Case, enumerate_case
from outrider.scripts.certificate.greedy import greedy_layer
from outrider.scripts.certificate.recorder import rule_of
from outrider.scripts.certificate.sampled import Sample, sampling_layer
from outrider.scripts.common.progress import clock, named

ENOUGH = 1e-6  # a sample is stopped early once its p falls below
WARM = 1.0  # at a lower temperature next to nothing is left to chance, and nothing to see
DRAFTED = 3  # tokens of a draft


def ahead(world: layers.World) -> str:
    """How much there is to do, controls and all, before it is begun: tokens at the most, and how
    long the reference would take for them."""
    plan = world.plan
    greedy = plan.sampling.greedy
    tokens = 2 * len(world.chosen) * plan.greedy_tokens + (0 if greedy else 2 * plan.tokens)
    took = "" if world.pace is None else f", about {clock(world.pace * tokens)} of decoding"
    return (
        f"to do: {plan.cases} toy worlds, {2 if greedy else 3} controls (wrong code that must be "
        f"rejected), {tokens:,} tokens at most, half of them of controls{took}"
    )


def run(world: layers.World) -> list[dict[str, Any]]:
    """What came of each, in the words of certificate.json; at T = 0 nothing is sampled."""
    found = [world.memo.once("control-exact", lambda: _exact(world))]
    found.append(world.memo.once("control-greedy", lambda: _greedy(world)))
    if not world.plan.sampling.greedy:
        name = f"control-sampling-{world.plan.tokens}-{world.plan.alpha}"
        found.append(world.memo.once(name, lambda: _sampling(world)))
    return found


def _exact(world: layers.World) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tables = torch.randn(2, 4**3, 3, dtype=torch.float64, generator=generator)
    case = Case(3, TreeShape.chain(2), "iid", Sampling(1.0), *tables)
    error = enumerate_case(case, without_residual(rule_of(world.plan.verify))).error
    return {
        "name": "a rejected token's place is filled from the whole distribution",
        "layer": "exact",
        "rejected": error > layers.CASE_LIMIT,
        "evidence": f"output distribution off by {error:.2g}",
    }


def _greedy(world: layers.World) -> dict[str, Any]:
    wrong = bonus_from_the_draft(rule_of(world.plan.verify))
    how = dataclasses.replace(world.plan.reading(world.tie), verify=wrong)
    drafter, target = DraftModel(world.target, DRAFTED), world.target
    written = named(world.on_progress, "control: greedy")
    bad = greedy_layer(world.plain, target, drafter, world.chosen, how, world.theirs, written)
    return {
        "name": "the bonus token is the draft's last one",
        "layer": "greedy",
        "rejected": bad.defects + bad.astray > 0,
        "evidence": f"{bad.defects} of {bad.prompts} outputs differ, {bad.astray} tokens not the "
        "verifier's best",
    }


def _sampling(world: layers.World) -> dict[str, Any]:
    plan = world.plan
    warm = max(plan.sampling.temperature, WARM)
    how = dataclasses.replace(
        plan, chunk=1, sampling=dataclasses.replace(plan.sampling, temperature=warm)
    )
    drafter: Any = ScoredSharper(DraftModel(world.target, DRAFTED))
    stop = lambda sample: _p(sample) < min(ENOUGH, plan.alpha)
    drawn = named(world.on_progress, "control: sampling")
    bad = sampling_layer(world.plain, world.target, drafter, world.prompts, how, stop, drawn)
    drawn(plan.tokens, plan.tokens)  # it may stop early
    return {
        "name": "the draft is scored with another distribution than it was drawn from",
        "layer": "sampling",
        "rejected": _p(bad) < plan.alpha,
        "evidence": f"p = {_p(bad):.2g} after {len(bad.u):,} tokens at temperature {warm:g}",
    }


def _p(sample: Sample) -> float:
    return 0.0 if sample.outside or sample.astray else uniformity.overall(sample.tests())


# --- the wrong code; every draft here is a chain


def without_residual(rule: Rule) -> Rule:
    """Behind a rejection the token is drawn from the target's whole distribution."""

    def wrong(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        verdict = rule(tree, distribution, rng)
        rows = torch.arange(len(verdict.length), device=verdict.length.device)
        p = distribution.at(rows, verdict.length).dense(distribution.vocab_size)
        whole = rng.draw(p, rows, verdict.length - 1)
        rejected = verdict.length < tree.size
        return dataclasses.replace(verdict, bonus=torch.where(rejected, whole, verdict.bonus))

    return wrong


def bonus_from_the_draft(rule: Rule) -> Rule:
    """Behind a draft that was accepted whole its last token comes once more."""

    def wrong(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        verdict = rule(tree, distribution, rng)
        if not tree.width:
            return verdict
        last = tree.tokens.gather(1, (verdict.length - 1).clamp(min=0)[:, None])[:, 0]
        whole = (verdict.length > 0) & (verdict.length == tree.size)
        return dataclasses.replace(verdict, bonus=torch.where(whole, last, verdict.bonus))

    return wrong


class ScoredSharper(Wrapped):
    """Says that its drafts were drawn from the square of the distribution that they were."""

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """See decode.drafters.Drafter."""
        tree = self.inner.propose(budget, sampling, rng)
        if tree.proposal is None:
            return tree
        weights = tree.proposal.probs.square()
        claimed = weights / weights.sum(-1, keepdim=True)
        return dataclasses.replace(tree, proposal=dataclasses.replace(tree.proposal, probs=claimed))
