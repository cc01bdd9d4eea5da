"""The sampling layer of a certificate: every emitted token, placed in the distribution that it was
verified against (recorder.py, transforms.py). Whether that is the target's is judged by the greedy
layer, whose tokens come from the same passes, masks and cache.

Shape letters: O orders, G strata, n sample size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Generation, Request
from outrider.decode.sampling import Sampling
from outrider.scripts.certificate import transforms, uniformity
from outrider.scripts.certificate.recorder import Recorded, mismatches, recorded
from outrider.scripts.certificate.setup import CHUNK, CertifySetup
from outrider.scripts.certificate.uniformity import Test

ORDERS = ("by probability", "by id")
GROUPS = (
    "all tokens",
    "first of an answer",
    "first of a cycle",
    "inside a draft",
    "bonus of a whole draft",
)
# of every order and stratum, and of neighbours in every order
MOST_TESTS = len(ORDERS) + len(GROUPS) - 1 + 3 * len(ORDERS)
COIN = 20240601  # beside the seed of the run: places a token within its own mass


@dataclass
class Sample:
    """n emitted tokens in the order of their requests, an array each.

    u: [n, O] transforms, one column per order; groups: [n, G] bool, strata; sequence: which
    request; cycle: number of its cycle in its answer (0 = the prefill's); depth: place in its
    cycle (0 = first token of a cycle, or the prefill's); outside: it has no mass; drafted: it was
    an accepted draft token. drafts: cycles that had a draft to verify. mismatches: answers that
    hold something else than verification chose.
    """

    u: np.ndarray
    groups: np.ndarray
    sequence: np.ndarray
    cycle: np.ndarray
    depth: np.ndarray
    outside: np.ndarray
    drafted: np.ndarray
    drafts: int
    mismatches: int

    def tests(self) -> list[Test]:
        """Return every test of the sample, the smallest p first.

        The strata are known before the token: that a cycle got as far as place d says nothing
        about the token there, given those before it (docs/lossless.md). Whether the token
        itself was an accepted draft token would."""
        same = np.r_[False, self.sequence[1:] == self.sequence[:-1]]
        # neighbouring requests at the same place of the same cycle, where two that share their
        # random numbers would draw by the same ones
        ranked = np.lexsort((self.sequence, self.depth, self.cycle))
        place = np.stack([self.cycle, self.depth], 1)[ranked]
        alike = np.r_[False, (place[1:] == place[:-1]).all(1)]
        found: list[Test] = []
        for u, order in zip(self.u.T, ORDERS, strict=True):
            found += uniformity.uniformity(u, GROUPS[0], order)
            inside, between = same & (self.depth > 0), same & (self.depth == 0)
            found += uniformity.independence(u, inside, "two tokens inside a cycle", order)
            found += uniformity.independence(u, between, "two tokens between cycles", order)
            found += uniformity.independence(u[ranked], alike, "two answers at one place", order)
        for mask, name in zip(self.groups.T[1:], GROUPS[1:], strict=True):
            found += uniformity.uniformity(self.u[mask, 0], name, ORDERS[0])
        return sorted(found, key=lambda test: test.p)

    def p(self) -> float:
        """Return the p-value of all tests together; 0 where a token has no business being
        there."""
        if self.outside.any() or self.mismatches:
            return 0.0
        return uniformity.overall(self.tests())

    def json(self, alpha: float) -> dict[str, Any]:
        """Return the layer in certificate.json; it neither passed nor failed (None) where there
        were too few tokens for one test."""
        tests, outside, why = self.tests(), int(self.outside.sum()), ""
        p = uniformity.overall(tests)
        if self.mismatches:
            why = f"{self.mismatches} answers hold other tokens than verification chose"
        elif outside:
            why = (
                f"{outside} emitted tokens have probability 0 under the distribution they were "
                "verified against"
            )
        elif p < alpha:
            worst = f"{tests[0].name} of {tests[0].stratum}: p = {tests[0].p:.3g}"
            why = f"{worst}, all tests together {p:.3g} < alpha = {alpha:g}"
        return {
            "name": "sampling",
            "passed": not why if tests or why else None,
            "why": why,
            "tokens": len(self.u),
            "alpha": alpha,
            "p": p,
            "tests": [asdict(test) for test in tests],
            "drafted_share": float(self.drafted.mean()),
            "cycles_with_a_draft": self.drafts,
            "outside_the_law": outside,
        }


def sampling_layer(
    setup: CertifySetup,
    drafter: Drafter,
    stop: Callable[[Sample], bool] = lambda sample: False,
    name: str = "sampling",
) -> Sample:
    """Decode until as many tokens are out as the plan says (the prompts again and again, each time
    with other random numbers), and place every one of them in the distribution it was verified
    against.

    Exactly that many are used, cut in the order of the requests, so that neither a stop token
    nor the budget selects. stop(sample so far) ends early: for controls that are known to fail
    already. name: in the progress.
    """
    plan, prompts = setup.plan, setup.prompts
    answers, done, drafts, wrong = list[dict[str, np.ndarray]](), 0, 0, 0
    while True:
        setup.on_progress(done, plan.tokens, name)
        usual = done / len(answers) if answers else plan.max_new_tokens  # tokens of an answer
        count = min(CHUNK * plan.batch_size, math.ceil((plan.tokens - done) / usual))
        requests = [
            Request(list(prompts[i % len(prompts)]), plan.max_new_tokens, id=i)
            for i in range(len(answers), len(answers) + count)
        ]
        run, lines = recorded(setup.target, drafter, requests, plan)
        for request, g, line in zip(requests, run.generations, lines, strict=True):
            coin = np.random.default_rng([plan.seed, COIN, request.id])
            found = placed(g, line, plan.sampling, coin)
            answers.append({"sequence": np.full(len(line), request.id), **found})
        done += sum(map(len, lines))
        drafts += sum(c.proposed > 0 for g in run.generations for c in g.cycles)
        wrong += mismatches(lines, run)
        arrays = {
            key: np.concatenate([answer[key] for answer in answers])[: plan.tokens]
            for key in answers[0]
        }
        sample = Sample(**arrays, drafts=drafts, mismatches=wrong)
        if done >= plan.tokens or stop(sample):
            setup.on_progress(plan.tokens, plan.tokens, name)
            return sample


def placed(
    g: Generation, line: Recorded, sampling: Sampling, coin: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return what a sample holds of the tokens `line`, which begin the generation `g`."""
    count, start = len(line), len(g.prompt_ids)
    cycle, depth = (numbers[:count] for numbers in cycles(g))
    text, tokens = [*g.prompt_ids, *g.token_ids], [token for token, _ in line]
    past = [text[:end] for end in range(start, start + count)] if sampling.uses_history else ()
    logits = torch.stack([kept for _, kept in line])
    p = transforms.places(logits, torch.tensor(tokens, device=logits.device), sampling, past)
    # a token without mass has no transform: it is counted apart, and its place is drawn
    v = coin.random((count, len(ORDERS)))
    u = np.stack([p.below, p.below_by_id], 1) + v * p.mass[:, None]
    return {
        "u": np.where(p.outside[:, None], v, u.clip(0, 1)),
        "groups": strata(g, depth, cycle),
        "cycle": cycle,
        "depth": depth,
        "outside": p.outside,
        "drafted": np.array(g.from_draft[:count]),
    }


def strata(g: Generation, depth: np.ndarray, cycle: np.ndarray) -> np.ndarray:
    """[n, G] bool, of the first n tokens of an answer. Where an answer will end is not known
    before its last token, so no stratum asks."""
    proposed = np.array([0, *(c.proposed for c in g.cycles)])[cycle]
    masks = (
        np.ones(len(depth), dtype=bool),
        np.arange(len(depth)) == 0,
        (depth == 0) & (cycle > 0),
        (depth > 0) & (depth < proposed),
        (depth > 0) & (depth == proposed),
    )
    return np.stack(masks, 1)


def cycles(generation: Generation) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of every token's cycle (0: the prefill's, a cycle of its own), and its
    place there."""
    starts = np.array([0, *(c.start for c in generation.cycles)])
    tokens = np.arange(len(generation.token_ids))
    cycle = np.searchsorted(starts, tokens, side="right") - 1
    return cycle, tokens - starts[cycle]
