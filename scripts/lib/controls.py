"""Negative controls: every known wrong rule with the layer that must catch it, and that measure on correct code.

A test of losslessness that has never failed proves little; one that fails each of these proves something.

scripts/certify.py runs them on the user's machine; tests/test_negative_controls.py keeps them.

Layers: "enumeration" (exact law of one verification), "engine enumeration" (exact law of the whole loop),
"scripted uniforms" (what lives below the exact law: one number used twice, u = 0, a sum of 0), "acceptance floor" (what
is lossless and worthless). The layers "greedy" and "sampling" run on the user's target: see live.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.adaptive import Adaptive
from decode.drafters import Drafter, DraftModel, NoDraft
from decode.engine import Request, generate
from decode.rng import ACCEPT, Rng, inverse_cdf
from decode.sampling import Law, Sampling
from decode.target import Target
from decode.tree import DraftTree, Proposal, TreeShape
from decode.verify import RULES
from scripts.lib import wrong_drafters, wrong_rules
from scripts.lib.engine_law import Counted, TableDrafter, engine_law, toy_model
from scripts.lib.enumerator import Case, Mangle, Verifier, enumerate_case

Rule = wrong_rules.Rule
Measure = Callable[[], float]
EXACT, LOOP, FLOOR, COUNT = 1e-9, 1e-9, 0.01, 0.0

CHAIN = TreeShape.chain(2)
STAR = TreeShape.of([(0,), (1,), (2,)])
PAIR = TreeShape.of([(0,), (1,), (0, 0), (1, 0)])  # two chains
BUSHY = TreeShape.of([(0,), (1,), (0, 0), (0, 1)])


@dataclass(frozen=True)
class Control:
    """wrong() is what the layer measures on the wrong code, right() on the correct code; above `limit` means caught."""

    name: str
    layer: str
    seen: str
    wrong: Measure
    right: Measure
    limit: float


def rule_named(name: str) -> Rule:
    """A rule of decode.verify as a callable, on sampled and deterministic trees alike."""
    from decode.verify import verify

    assert name in RULES
    return lambda tree, law, rng: verify(tree, law, rng, name)


def cases(shape: TreeShape, scheme: str, sampling: Sampling, vocab: int = 4, count: int = 4) -> list[Case]:
    """`count` random worlds of one shape and scheme, always the same ones."""
    generator = torch.Generator().manual_seed(7)
    contexts = (vocab + 1) ** (shape.depth + 1)

    def logits() -> Tensor:
        return torch.randn(contexts, vocab, dtype=torch.float64, generator=generator) * 1.5

    return [Case(vocab, shape, scheme, sampling, logits(), logits()) for _ in range(count)]


def law_error(worlds: Sequence[Case], rule: Verifier, mangle: Mangle | None = None) -> float:
    """Largest error of any output's probability over the worlds."""
    return max(enumerate_case(case, rule, mangle).error for case in worlds)


def _enumerated(
    name: str, seen: str, shape: TreeShape, scheme: str, sampling: Sampling, rule: Rule | None = None,
    mangle: Mangle | None = None,
) -> Control:  # fmt: skip
    worlds = cases(shape, scheme, sampling, *((3, 2) if shape is PAIR and scheme == "iid" else (4, 4)))
    base = [rule_named(r) for r in RULES]
    return Control(
        name, "enumeration", seen,
        lambda: min(law_error(worlds, r, mangle) for r in ([rule] if rule else base)),
        lambda: max(law_error(worlds, r) for r in base),
        EXACT,
    )  # fmt: skip


ONE, WARM, CUT = Sampling(1.0), Sampling(0.6), Sampling(1.0, top_p=0.8)


def _enumeration() -> list[Control]:
    r, d = wrong_rules, wrong_drafters
    return [
        _enumerated("typical acceptance", "Medusa", BUSHY, "top", ONE, r.typical_acceptance),
        _enumerated("argmax token after the draft at T > 0", "Medusa, fast mode", BUSHY, "top", ONE, r.argmax_bonus),
        _enumerated("draws per path, longest path wins", "Medusa, nucleus", PAIR, "top", CUT, r.draws_per_path),
        _enumerated("best of two chains", "best-of-n drafts", PAIR, "iid", ONE, r.best_of_chains),
        _enumerated("warped draft scored un-warped", "several engines", CHAIN, "iid", ONE, None, d.scored_unwarped),
        _enumerated("draft law rounded to bfloat16", "several engines", CHAIN, "iid", ONE, None, d.scored_in_bfloat16),
        _enumerated("residual not renormalised", "recursive rejection", STAR, "without", ONE, r.residual_unnormalised),
        _enumerated("residual stale after a rejected sibling", "recursive rejection", STAR, "without", ONE,
                    r.residual_stale),
        _enumerated("rejected token stays in the residual", "EAGLE-style trees", STAR, "top", ONE,
                    r.rejected_token_stays),
        _enumerated("drawn without replacement, scored with", "SpecInfer on RSD trees", STAR, "without", ONE, None,
                    d.without_scored_as_with),
        _enumerated("drawn with replacement, scored without", "the reverse", STAR, "iid", ONE, None,
                    d.with_scored_as_without),
        _enumerated("deterministic candidate scored with its softmax", "top-k trees", BUSHY, "top", ONE, None,
                    d.candidates_scored_softly),
        _enumerated("bonus token from the un-warped law", "several engines", CHAIN, "iid", WARM, r.bonus_unwarped),
        _enumerated("top-p applied again to the residual", "litgpt", CHAIN, "iid", CUT, r.top_p_twice),
        _enumerated("temperature applied twice", "mutation", CHAIN, "iid", WARM, r.temperature_twice),
        _enumerated("softmax acceptance at T = 0", "litgpt", CHAIN, "top", Sampling(0.0), r.softmax_acceptance),
        _enumerated("bonus token from the wrong node", "mutation", CHAIN, "iid", ONE, r.bonus_from_wrong_node),
        _enumerated("law off by one row", "mutation", CHAIN, "iid", ONE, r.law_of_the_child),
        _enumerated("traversal with a stale residual", "vllm-ascend #7807", CHAIN, "iid", ONE, r.traversal_stale),
        _enumerated("traversal with the plain ratio", "vllm-ascend #7807", CHAIN, "iid", ONE, r.traversal_ratio),
        _enumerated("unlikely sampled token dropped before verification", "DSpark, appendix A", CHAIN, "iid", ONE, None,
                    d.drops_unlikely),
        _enumerated("sampled siblings re-ranked by q", "DSpark, appendix A", STAR, "without", ONE, None,
                    d.reranks_siblings),
    ]  # fmt: skip


# --- the whole loop


class Mangled:
    """A drafter whose trees suffer `mangle` after they are drawn."""

    def __init__(self, drafter: Drafter, mangle: Mangle) -> None:
        self.inner, self.mangle = drafter, mangle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return self.mangle(self.inner.propose(budget, sampling, rng))


def commits_wrong_rows(target: Target) -> Target:
    """A target whose cache keeps the first node's keys and values for every accepted node."""
    wrong = copy.copy(target)

    def new_cache(*args: Any, **kwargs: Any) -> Any:
        cache = target.new_cache(*args, **kwargs)
        commit = cache.commit
        cache.commit = lambda path, length: commit(path.clamp(max=0), length)  # type: ignore[method-assign]
        return cache

    wrong.new_cache = new_cache  # type: ignore[method-assign]
    return wrong


def _loop() -> list[Control]:
    shape = TreeShape.of([(0,), (1,)])

    def measure(change: Callable[[Target], Target], mangle: Mangle | None) -> float:
        target = toy_model(vocab=4)
        target.probe()  # on the sound model: the probe would find the wrong commit by itself
        drafter: Any = TableDrafter(shape, "without", 4)
        drafter = Mangled(drafter, mangle) if mangle else drafter
        return engine_law(change(target), drafter, [3, 1, 2], 4, ONE, "rejection", shape).error

    def same(target: Target) -> Target:
        return target

    def adaptive(wrap: Callable[[Drafter], Any]) -> float:
        drafter = wrap(Counted(TableDrafter(CHAIN, "iid", 3), CHAIN))  # below the rule: it sees the depth of each row
        return engine_law(toy_model(vocab=3), drafter, [1, 2], 5, ONE, shape=CHAIN).error

    right = lambda: measure(same, None)
    return [
        Control("cache keeps the wrong rows", "engine enumeration", "mutation",
                lambda: measure(commits_wrong_rows, None), right, LOOP),
        Control("mask lets siblings see each other", "engine enumeration", "mutation",
                lambda: measure(same, wrong_drafters.leaks_siblings), right, LOOP),
        Control("draft length adapted to the tokens just drafted", "engine enumeration", "DSpark, appendix A",
                lambda: adaptive(wrong_drafters.Anticipating), lambda: adaptive(lambda d: Adaptive(d, cost=0.27)),
                LOOP),
    ]  # fmt: skip


# --- scripted and recorded random numbers


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
    """Numbers asked for more than once while decoding plainly, with a sampled chain and with a sampled tree."""
    count = 0
    target = toy_model()
    shape = TreeShape.of([(0,), (1,), (0, 0)])
    drafters: list[Any] = [NoDraft(), DraftModel(toy_model(seed=5, layers=1), 2), TableDrafter(shape, "without", 8)]
    for drafter in drafters:
        for rule in RULES:
            heard: list[float] = []

            class Recorder(rng):  # type: ignore[misc,valid-type]
                def uniform(self, rows: Tensor, node: Tensor, purpose: int, heard: list = heard) -> Tensor:
                    u = super().uniform(rows, node, purpose)
                    heard += u.flatten().tolist()
                    return u

            requests = [Request([3, 1, 4], 12, id=i) for i in range(3)]
            generate(target, drafter, requests, ONE, batch_size=2, verify=rule, eos_ids=(), coins=Recorder)
            count += len(heard) - len(set(heard))
    return float(count)


def _scripted(rng: type[Rng], value: float, rows: int) -> Rng:
    class Scripted(rng):  # type: ignore[misc,valid-type]
        def uniform(self, rows: Tensor, node: Tensor, purpose: int) -> Tensor:
            return torch.full(node.shape, value, dtype=torch.float64)

    return Scripted(0, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))


def impossible_tokens(rng: type[Rng]) -> float:
    """Tokens of probability 0 emitted when every random number is exactly 0: chains and siblings, both rules."""
    count = 0
    half = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64)  # the draft's law; the target's has the other half
    logits = torch.tensor([-torch.inf, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    for shape in (TreeShape.chain(2), TreeShape.of([(0,), (1,)])):
        n = len(shape)
        tokens = torch.tensor([[0, 1]])
        tree = DraftTree.static(shape, tokens, None, torch.ones(1, n, dtype=torch.bool),
                                Proposal(half.expand(1, 1, 4), torch.zeros(1, n, dtype=torch.int64)))  # fmt: skip
        for rule in RULES:
            law = Law(ONE, logits.expand(1, n + 1, 4), tree)
            verdict = RULES[rule](tree, law, _scripted(rng, 0.0, 1))
            count += int(verdict.length.sum()) + int((verdict.bonus < 2).sum())
    return float(count)


def empty_residuals(rules: Sequence[Rule], rows: int) -> float:
    """Draws from weights that are not finite or sum to 0, when p = q up to one unit in the last place and u is as large
    as it gets, so that a test of probability 1 - 6e-8 fails and the residual is empty."""
    bad = 0
    generator = torch.Generator().manual_seed(3)
    for vocab in (2, 16):
        logits = torch.randn(rows, 1, vocab, generator=generator).expand(rows, 2, vocab)
        law = logits[:, :1].softmax(-1)
        token = law[:, 0].argmax(-1)
        nudged = law.scatter(2, token[:, None, None], torch.nextafter(law.amax(-1, keepdim=True), torch.tensor(2.0)))
        tree = DraftTree.chain(token[:, None], None, torch.ones(rows, 1, dtype=torch.bool),
                               Proposal(nudged, torch.zeros(rows, 1, dtype=torch.int64)))  # fmt: skip
        for rule in rules:
            heard: list[Tensor] = []
            rng = _scripted(Rng, 1 - 2.0**-53, rows)
            draw = rng.draw
            rng.draw = lambda w, r, n, draw=draw, heard=heard: (heard.append(w), draw(w, r, n))[1]  # type: ignore
            verdict = rule(tree, Law(ONE, logits, tree), rng)
            for weights in heard:
                bad += int((~weights.sum(-1).isfinite() | ~(weights.sum(-1) > 0)).sum())
            reached = logits[torch.arange(rows), verdict.length].softmax(-1).gather(1, verdict.bonus[:, None])
            bad += int((~(reached > 0)).sum())
    return float(bad)


def _below() -> list[Control]:
    base = [rule_named(r) for r in RULES]
    layer = "scripted uniforms"
    return [
        Control("one number for the draft draw and its test", layer, "several engines",
                lambda: repeated_numbers(SharedNumber), lambda: repeated_numbers(Rng), COUNT),
        Control("u <= p accepts probability 0 at u = 0", layer, "float32 generators return 0",
                lambda: impossible_tokens(LooseTest), lambda: impossible_tokens(Rng), COUNT),
        Control("empty residual divided by its sum", layer, "gpt-fast, transformers, EAGLE",
                lambda: empty_residuals([wrong_rules.residual_unguarded], 50),
                lambda: empty_residuals(base, 2000), COUNT),
    ]  # fmt: skip


# --- what no law can show


class _Misinformed:
    """A drafter that reads another first token (a BOS, say) than the target: its state is wrong from the start."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.inner, self.vocab = drafter, vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.inner.begin([torch.cat([(p[:1] + 1) % self.vocab, p[1:]]) for p in prompts], sampling)


def acceptance_shortfall(change: Callable[[Drafter], Any], rule: str | Rule) -> float:
    """Share of draft tokens rejected when the target drafts for itself: 0 for a sound loop, T = 0 and T = 1."""
    target = toy_model(vocab=32)
    proposed = accepted = 0
    for sampling in (Sampling(0.0), ONE):
        drafter = change(DraftModel(target, 3))
        requests = [Request([3, 1, 4, 1, 5][: 2 + i], 24, id=i) for i in range(3)]
        run = generate(target, drafter, requests, sampling, batch_size=2, verify=rule, eos_ids=())
        for cycle in (c for g in run.generations for c in g.cycles):
            proposed, accepted = proposed + cycle.proposed, accepted + cycle.accepted
    return 1 - accepted / proposed


def _floor() -> list[Control]:
    def right() -> float:
        return max(acceptance_shortfall(lambda d: d, r) for r in RULES)

    return [
        Control("drafter reads another first token", "acceptance floor", "prompt templates, missing BOS",
                lambda: acceptance_shortfall(lambda d: _Misinformed(d, 32), "traversal"), right, FLOOR),
        Control("draft ignored", "acceptance floor", "mutation",
                lambda: acceptance_shortfall(lambda d: d, wrong_rules.never_accepts), right, FLOOR),
    ]  # fmt: skip


def controls() -> list[Control]:
    """Every control whose layer needs no model of the user's."""
    return [*_enumeration(), *_loop(), *_below(), *_floor()]
