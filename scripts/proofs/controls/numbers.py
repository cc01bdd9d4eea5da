"""Negative controls below and beside the exact distribution: random numbers used wrongly,
code that is lossless and worthless.

Scripted or recorded numbers stand in for the generator; an acceptance floor is what a sound
loop keeps when the target drafts for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter, NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.inverse_cdf import inverse_cdf
from outrider.decode.rng import ACCEPT, Rng
from outrider.decode.sampling import Distribution, Sampling, normalised
from outrider.decode.tree import DraftTree, Proposal, TreeShape
from outrider.decode.verify import RULES
from outrider.decode.wrapped import Wrapped
from outrider.scripts.proofs.controls import rules as wrong_rules
from outrider.scripts.proofs.controls.base import ONE, Control, Measure, Rule, rule_named
from outrider.scripts.proofs.engine_distribution import TableDrafter, toy_model

FLOOR, COUNT = 0.01, 0.0


class SharedNumber(Rng):
    """Draws a draft token with the very number that will test it."""

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return inverse_cdf(weights, self.uniform(rows, node, ACCEPT))


class LooseTest(Rng):
    """u <= probability: accepts a token of probability 0 when u = 0."""

    def accept(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self.uniform(rows, node, ACCEPT) <= probability

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return (self.uniform(rows, node, ACCEPT) <= probability).to(torch.uint8).argmax(1)


def repeated_numbers(rng: type[Rng]) -> float:
    """Numbers asked for twice while decoding plainly, with a drawn chain and a drawn tree."""
    count = 0
    target = toy_model()
    shape = TreeShape.of([(0,), (1,), (0, 0)])
    drafters: list[Any] = [
        NoDraft(),
        DraftModel(toy_model(seed=5, layers=1), 2),
        TableDrafter(shape, "without", 8),
    ]
    for drafter in drafters:
        for rule in RULES:
            heard: list[float] = []

            class Recorder(rng):  # type: ignore[misc,valid-type]
                def uniform(
                    self, rows: Tensor, node: Tensor, purpose: int, heard: list = heard
                ) -> Tensor:
                    u = super().uniform(rows, node, purpose)
                    heard += u.flatten().tolist()
                    return u

            requested = [Request([3, 1, 4], 12, id=i) for i in range(3)]
            how: dict[str, Any] = {"verify": rule, "eos_ids": (), "coins": Recorder}
            generate(target, drafter, requested, ONE, batch_size=2, **how)
            count += len(heard) - len(set(heard))
    return float(count)


def _scripted(rng: type[Rng], value: float, rows: int) -> Rng:
    class Scripted(rng):  # type: ignore[misc,valid-type]
        def uniform(self, rows: Tensor, node: Tensor, purpose: int) -> Tensor:
            return torch.full(node.shape, value, dtype=torch.float64)

    return Scripted(0, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))


def impossible_tokens(rng: type[Rng]) -> float:
    """Tokens of probability 0 emitted where every number is 0: chains, siblings, both rules."""
    count = 0
    # the draft's distribution; the target's has the other half
    half = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64)
    logits = torch.tensor([-torch.inf, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    for shape in (TreeShape.chain(2), TreeShape.of([(0,), (1,)])):
        n, tokens = len(shape), torch.tensor([[0, 1]])
        proposal = Proposal(half.expand(1, 1, 4), torch.zeros_like(tokens))
        tree = DraftTree.static(shape, tokens, None, torch.ones(1, n, dtype=torch.bool), proposal)
        for rule in RULES:
            distribution = Distribution(ONE, logits.expand(1, n + 1, 4), tree)
            verdict = RULES[rule](tree, distribution, _scripted(rng, 0.0, 1))
            count += int(verdict.length.sum()) + int((verdict.bonus < 2).sum())
    return float(count)


def empty_residuals(rules: Sequence[Rule], rows: int) -> float:
    """Draws from weights that are not finite or sum to 0, when p = q up to one unit in the
    last place and u is as large as it gets, so that a test of probability 1 - 6e-8 fails and
    the residual is empty."""
    bad = 0
    generator = torch.Generator().manual_seed(3)
    for vocab in (2, 16):
        logits = torch.randn(rows, 1, vocab, generator=generator).expand(rows, 2, vocab)
        distribution = normalised(logits[:, :1])
        token = distribution[:, 0].argmax(-1)
        above = torch.nextafter(distribution.amax(-1, keepdim=True), torch.tensor(2.0))
        nudged, row = (
            distribution.scatter(2, token[:, None, None], above),
            torch.zeros_like(token[:, None]),
        )
        sampled = torch.ones_like(row, dtype=torch.bool)
        tree = DraftTree.chain(token[:, None], None, sampled, Proposal(nudged, row))
        for rule in rules:
            heard: list[Tensor] = []
            rng = _scripted(Rng, 1 - 2.0**-53, rows)
            draw = rng.draw
            rng.draw = lambda w, r, n, draw=draw, heard=heard: (heard.append(w), draw(w, r, n))[1]  # type: ignore
            verdict = rule(tree, Distribution(ONE, logits, tree), rng)
            for weights in heard:
                bad += int((~weights.sum(-1).isfinite() | ~(weights.sum(-1) > 0)).sum())
            distribution_there = logits[torch.arange(rows), verdict.length].softmax(-1)
            bad += int((~(distribution_there.gather(1, verdict.bonus[:, None]) > 0)).sum())
    return float(bad)


def below() -> list[Control]:
    """What the exact distribution does not see: numbers used twice, u = 0, a sum of 0."""

    def one(name: str, seen: str, wrong: Measure, right: Measure) -> Control:
        return Control(name, "scripted uniforms", seen, wrong, right, COUNT)

    return [
        one(
            "one number for the draft draw and its test",
            "several engines",
            lambda: repeated_numbers(SharedNumber),
            lambda: repeated_numbers(Rng),
        ),
        one(
            "u <= p accepts probability 0 at u = 0",
            "float32 generators return 0",
            lambda: impossible_tokens(LooseTest),
            lambda: impossible_tokens(Rng),
        ),
        one(
            "empty residual divided by its sum",
            "gpt-fast, transformers, EAGLE",
            lambda: empty_residuals([wrong_rules.residual_unguarded], 50),
            lambda: empty_residuals([rule_named(r) for r in RULES], 2000),
        ),
    ]


# --- what no distribution can show


class _Misinformed(Wrapped):
    """A drafter that reads another first token (a BOS, say) than the target."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        super().__init__(drafter)
        self.vocab = vocab

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.inner.begin([torch.cat([(p[:1] + 1) % self.vocab, p[1:]]) for p in prompts], sampling)


def acceptance_shortfall(change: Callable[[Drafter], Any], rule: str | Rule) -> float:
    """Share of draft tokens rejected where the target drafts for itself: 0 for a sound loop."""
    target = toy_model(vocab=32)
    proposed = accepted = 0
    for sampling in (Sampling(0.0), ONE):
        drafter = change(DraftModel(target, 3))
        requests = [Request([3, 1, 4, 1, 5][: 2 + i], 24, id=i) for i in range(3)]
        run = generate(target, drafter, requests, sampling, batch_size=2, verify=rule, eos_ids=())
        for cycle in (c for g in run.generations for c in g.cycles):
            proposed, accepted = proposed + cycle.proposed, accepted + cycle.accepted
    return 1 - accepted / proposed


def floor() -> list[Control]:
    """Lossless and worthless."""

    def one(name: str, seen: str, wrong: Measure) -> Control:
        return Control(name, "acceptance floor", seen, wrong, right, FLOOR)

    def right() -> float:
        return max(acceptance_shortfall(lambda d: d, r) for r in RULES)

    return [
        one(
            "drafter reads another first token",
            "prompt templates, missing BOS",
            lambda: acceptance_shortfall(lambda d: _Misinformed(d, 32), "traversal"),
        ),
        one(
            "draft ignored",
            "mutation",
            lambda: acceptance_shortfall(lambda d: d, wrong_rules.never_accepts),
        ),
    ]
