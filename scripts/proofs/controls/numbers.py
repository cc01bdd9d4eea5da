"""Negative controls below and beside the exact law: random numbers used wrongly, code that is
lossless and worthless.

Scripted or recorded numbers stand in for the generator; an acceptance floor is what a sound
loop keeps when the target drafts for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decode.drafters import Drafter, DraftModel, NoDraft
from decode.engine import Request, generate
from decode.rng import ACCEPT, Rng, inverse_cdf
from decode.sampling import Law, Sampling
from decode.tree import DraftTree, Proposal, TreeShape
from decode.verify import RULES
from decode.wrapped import Wrapped
from scripts.proofs.controls import rules as wrong_rules
from scripts.proofs.controls.base import ONE, Control, Rule, rule_named
from scripts.proofs.engine_law import TableDrafter, toy_model

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
    """Numbers asked for more than once while decoding plainly, with a sampled chain and with a
    sampled tree.
    """
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

            requests = [Request([3, 1, 4], 12, id=i) for i in range(3)]
            generate(
                target,
                drafter,
                requests,
                ONE,
                batch_size=2,
                verify=rule,
                eos_ids=(),
                coins=Recorder,
            )
            count += len(heard) - len(set(heard))
    return float(count)


def _scripted(rng: type[Rng], value: float, rows: int) -> Rng:
    class Scripted(rng):  # type: ignore[misc,valid-type]
        def uniform(self, rows: Tensor, node: Tensor, purpose: int) -> Tensor:
            return torch.full(node.shape, value, dtype=torch.float64)

    return Scripted(0, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))


def impossible_tokens(rng: type[Rng]) -> float:
    """Tokens of probability 0 emitted when every random number is exactly 0: chains and
    siblings, both rules.
    """
    count = 0
    half = torch.tensor(
        [0.5, 0.5, 0, 0], dtype=torch.float64
    )  # the draft's law; the target's has the other half
    logits = torch.tensor([-torch.inf, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    for shape in (TreeShape.chain(2), TreeShape.of([(0,), (1,)])):
        n = len(shape)
        tokens = torch.tensor([[0, 1]])
        tree = DraftTree.static(
            shape,
            tokens,
            None,
            torch.ones(1, n, dtype=torch.bool),
            Proposal(half.expand(1, 1, 4), torch.zeros(1, n, dtype=torch.int64)),
        )
        for rule in RULES:
            law = Law(ONE, logits.expand(1, n + 1, 4), tree)
            verdict = RULES[rule](tree, law, _scripted(rng, 0.0, 1))
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
        law = logits[:, :1].softmax(-1)
        token = law[:, 0].argmax(-1)
        nudged = law.scatter(
            2, token[:, None, None], torch.nextafter(law.amax(-1, keepdim=True), torch.tensor(2.0))
        )
        tree = DraftTree.chain(
            token[:, None],
            None,
            torch.ones(rows, 1, dtype=torch.bool),
            Proposal(nudged, torch.zeros(rows, 1, dtype=torch.int64)),
        )
        for rule in rules:
            heard: list[Tensor] = []
            rng = _scripted(Rng, 1 - 2.0**-53, rows)
            draw = rng.draw
            rng.draw = lambda w, r, n, draw=draw, heard=heard: (heard.append(w), draw(w, r, n))[1]  # type: ignore
            verdict = rule(tree, Law(ONE, logits, tree), rng)
            for weights in heard:
                bad += int((~weights.sum(-1).isfinite() | ~(weights.sum(-1) > 0)).sum())
            reached = (
                logits[torch.arange(rows), verdict.length]
                .softmax(-1)
                .gather(1, verdict.bonus[:, None])
            )
            bad += int((~(reached > 0)).sum())
    return float(bad)


def below() -> list[Control]:
    base = [rule_named(r) for r in RULES]
    layer = "scripted uniforms"
    return [
        Control(
            "one number for the draft draw and its test",
            layer,
            "several engines",
            lambda: repeated_numbers(SharedNumber),
            lambda: repeated_numbers(Rng),
            COUNT,
        ),
        Control(
            "u <= p accepts probability 0 at u = 0",
            layer,
            "float32 generators return 0",
            lambda: impossible_tokens(LooseTest),
            lambda: impossible_tokens(Rng),
            COUNT,
        ),
        Control(
            "empty residual divided by its sum",
            layer,
            "gpt-fast, transformers, EAGLE",
            lambda: empty_residuals([wrong_rules.residual_unguarded], 50),
            lambda: empty_residuals(base, 2000),
            COUNT,
        ),
    ]


# --- what no law can show


class _Misinformed(Wrapped):
    """A drafter that reads another first token (a BOS, say) than the target: its state is
    wrong from the start.
    """

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        super().__init__(drafter)
        self.vocab = vocab

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.inner.begin([torch.cat([(p[:1] + 1) % self.vocab, p[1:]]) for p in prompts], sampling)


def acceptance_shortfall(change: Callable[[Drafter], Any], rule: str | Rule) -> float:
    """Share of draft tokens rejected when the target drafts for itself: 0 for a sound loop, T
    = 0 and T = 1.
    """
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
    def right() -> float:
        return max(acceptance_shortfall(lambda d: d, r) for r in RULES)

    return [
        Control(
            "drafter reads another first token",
            "acceptance floor",
            "prompt templates, missing BOS",
            lambda: acceptance_shortfall(lambda d: _Misinformed(d, 32), "traversal"),
            right,
            FLOOR,
        ),
        Control(
            "draft ignored",
            "acceptance floor",
            "mutation",
            lambda: acceptance_shortfall(lambda d: d, wrong_rules.never_accepts),
            right,
            FLOOR,
        ),
    ]
