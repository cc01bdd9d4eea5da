"""Negative controls: every known wrong rule with the layer that must catch it, and that
measure on correct code.

A test of losslessness that has never failed proves little; one that fails each of these proves
something.

scripts/certify.py runs them on the user's machine; tests/scripts/test_negative_controls.py
keeps them.

Layers: "enumeration" (exact distribution of one verification), "engine enumeration" (exact
distribution of the whole loop), "scripted uniforms" (what lives below the exact
distribution: one number used twice, u = 0, a sum of 0), "acceptance floor" (what is lossless
and worthless). The layers "greedy" and "sampling" run on the user's target: see live.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.decode.cache import TreeCache
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, generate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.verify import RULES
from outrider.decode.wrapped import Adaptive, Wrapped
from outrider.scripts.common.memo import Memo
from outrider.scripts.common.progress import OnProgress, named
from outrider.scripts.proofs.controls import drafters as wrong_drafters
from outrider.scripts.proofs.controls import field
from outrider.scripts.proofs.controls import numbers as number_controls
from outrider.scripts.proofs.controls import rules as wrong_rules
from outrider.scripts.proofs.controls.base import ONE, Control, Measure, Rule, rule_named
from outrider.scripts.proofs.engine_distribution import (
    TableDrafter,
    counted_chain,
    engine_distribution,
    toy_model,
)
from outrider.scripts.proofs.enumerator import Case, Mangle, Verifier, enumerate_case

EXACT, LOOP = 1e-9, 1e-9

CHAIN = TreeShape.chain(2)
STAR = TreeShape.of([(0,), (1,), (2,)])
PAIR = TreeShape.of([(0,), (1,), (0, 0), (1, 0)])  # two chains
BUSHY = TreeShape.of([(0,), (1,), (0, 0), (0, 1)])


def cases(
    shape: TreeShape, scheme: str, sampling: Sampling, vocab: int = 4, count: int = 4
) -> list[Case]:
    """`count` random worlds of one shape and scheme, always the same ones."""
    generator = torch.Generator().manual_seed(7)
    contexts = (vocab + 1) ** (shape.depth + 1)

    def logits() -> Tensor:
        return torch.randn(contexts, vocab, dtype=torch.float64, generator=generator) * 1.5

    return [Case(vocab, shape, scheme, sampling, logits(), logits()) for _ in range(count)]


def distribution_error(
    worlds: Sequence[Case], rule: Verifier, mangle: Mangle | None = None
) -> float:
    """Largest error of any output's probability over the worlds."""
    return max(enumerate_case(case, rule, mangle).error for case in worlds)


@dataclass(frozen=True)
class TreeCase:
    """What is enumerated: trees of a shape, how their tokens are drawn, under which
    distribution."""

    shape: TreeShape
    scheme: str
    sampling: Sampling = ONE


CHAINS, WARM_CHAINS = TreeCase(CHAIN, "iid"), TreeCase(CHAIN, "iid", Sampling(0.6))
CUT_CHAINS = TreeCase(CHAIN, "iid", Sampling(1.0, top_p=0.8))
GREEDY_CHAINS = TreeCase(CHAIN, "top", Sampling(0.0))
DISTINCT_STARS, DRAWN_STARS = TreeCase(STAR, "without"), TreeCase(STAR, "iid")
TOP_CHAINS = TreeCase(CHAIN, "top")
TOP_STARS, TOP_BUSHES = TreeCase(STAR, "top"), TreeCase(BUSHY, "top")
DRAWN_BUSHES = TreeCase(BUSHY, "without")
PAIRS, CUT_PAIRS = TreeCase(PAIR, "iid"), TreeCase(PAIR, "top", Sampling(1.0, top_p=0.8))


def _enumerated(
    name: str,
    seen: str,
    drafts: TreeCase,
    rule: Rule | None = None,
    mangle: Mangle | None = None,
) -> Control:
    size = (3, 2) if drafts == PAIRS else (4, 4)
    worlds = cases(drafts.shape, drafts.scheme, drafts.sampling, *size)
    base = [rule_named(r) for r in RULES]
    return Control(
        name,
        "enumeration",
        seen,
        lambda: min(distribution_error(worlds, r, mangle) for r in ([rule] if rule else base)),
        lambda: max(distribution_error(worlds, r) for r in base),
        EXACT,
    )


def _wrong_rules() -> list[Control]:
    """Rules of verification, each with drafts that show that it is wrong."""
    r, one = wrong_rules, _enumerated
    return [
        one("typical acceptance", "Medusa", TOP_BUSHES, r.typical_acceptance),
        one(
            "argmax token after the draft at T > 0", "Medusa, fast mode", TOP_BUSHES, r.argmax_bonus
        ),
        one("draws per path, longest path wins", "Medusa, nucleus", CUT_PAIRS, r.draws_per_path),
        one("best of two chains", "best-of-n drafts", PAIRS, r.best_of_chains),
        one(
            "residual not renormalised",
            "recursive rejection",
            DISTINCT_STARS,
            r.residual_unnormalised,
        ),
        one(
            "residual stale after a rejected sibling",
            "recursive rejection",
            DISTINCT_STARS,
            r.residual_stale,
        ),
        one(
            "rejected token stays in the residual",
            "EAGLE-style trees",
            TOP_STARS,
            r.rejected_token_stays,
        ),
        one(
            "bonus token from the un-warped distribution",
            "several engines",
            WARM_CHAINS,
            r.bonus_unwarped,
        ),
        one("top-p applied again to the residual", "litgpt", CUT_CHAINS, r.top_p_twice),
        one("temperature applied twice", "mutation", WARM_CHAINS, r.temperature_twice),
        one("softmax acceptance at T = 0", "litgpt", GREEDY_CHAINS, r.softmax_acceptance),
        one("bonus token from the wrong node", "mutation", CHAINS, r.bonus_from_wrong_node),
        one("distribution off by one row", "mutation", CHAINS, r.distribution_of_the_child),
        one("traversal with a stale residual", "vllm-ascend #7807", CHAINS, r.traversal_stale),
        one("traversal with the plain ratio", "vllm-ascend #7807", CHAINS, r.traversal_ratio),
    ]


def _field() -> list[Control]:
    """What engines shipped in 2026, by name or by mistake; typical acceptance is a rule above."""
    one = _enumerated
    soft = wrong_drafters.candidates_scored_softly
    return [
        one("deferred acceptance", "vLLM 0.33 (FLy)", CHAINS, field.deferred_acceptance(1)),
        one("acceptance at a set rate", "vLLM (synthetic)", CHAINS, field.synthetic_acceptance),
        one("greedy at T > 0", "SGLang on CPU and XPU", CHAINS, field.greedy_fallback),
        one("late rejection", "openvino.genai #4190", CHAINS, field.late_rejection),
        one("argmax drafts judged softly", "transformers 5.23", TOP_CHAINS, mangle=soft),
    ]


def _wrong_drafts() -> list[Control]:
    """Drafts that are not what they say, under every rule."""
    d = wrong_drafters

    def one(name: str, seen: str, drafts: TreeCase, mangle: Mangle) -> Control:
        return _enumerated(name, seen, drafts, mangle=mangle)

    return [
        one("warped draft scored un-warped", "several engines", CHAINS, d.scored_unwarped),
        one("un-warped draft scored warped", "the reverse", CHAINS, d.scored_sharpened),
        one(
            "draft distribution rounded to bfloat16",
            "several engines",
            CHAINS,
            d.scored_in_bfloat16,
        ),
        one(
            "drawn without replacement, scored with",
            "SpecInfer on RSD trees",
            DISTINCT_STARS,
            d.without_scored_as_with,
        ),
        one(
            "drawn with replacement, scored without",
            "the reverse",
            DRAWN_STARS,
            d.with_scored_as_without,
        ),
        one(
            "deterministic candidate scored with its softmax",
            "top-k trees",
            TOP_BUSHES,
            d.candidates_scored_softly,
        ),
        one(
            "unlikely sampled token dropped before verification",
            "DSpark, appendix A",
            CHAINS,
            d.drops_unlikely,
        ),
        one(
            "sampled siblings re-ranked by q",
            "DSpark, appendix A",
            DISTINCT_STARS,
            d.reranks_siblings,
        ),
        one(
            "nodes of a drawn tree left out by their own q",
            "DSpark, appendix A",
            DRAWN_BUSHES,
            d.drops_by_their_own_distribution,
        ),
    ]


# --- the whole loop


class Mangled(Wrapped):
    """A drafter whose trees suffer `mangle` after they are drawn."""

    def __init__(self, drafter: Drafter, mangle: Mangle) -> None:
        super().__init__(drafter)
        self.mangle = mangle

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


def leaks_siblings(target: Target) -> Target:
    """A target whose attention mask lets a node see every earlier node, not only its
    ancestors. Verification reads the tree as it is."""
    wrong = copy.copy(target)

    def score(cache: TreeCache, last: Tensor, tree: DraftTree, taps: Sequence[int] = ()) -> Step:
        everything = torch.ones_like(tree.layout.mask).tril()
        layout = dataclasses.replace(tree.layout, mask=everything)
        return target.score(cache, last, dataclasses.replace(tree, static_layout=layout), taps)

    wrong.score = score  # type: ignore[method-assign]
    return wrong


def in_company(rule: Rule) -> float:
    """How far the probabilities of the outputs of three requests that are decoded together are
    from those of each alone, at T = 0: no branch, so 0 or 1."""
    target = toy_model(vocab=8)
    requests = [Request([3, 1, 4, 1, 5][: 2 + i], 12, id=i) for i in range(3)]
    found = [
        generate(
            target,
            DraftModel(target, 2),
            requests,
            Sampling(0.0),
            batch_size=n,
            verify=r,
            eos_ids=(),
        )
        for n, r in ((1, "rejection"), (3, rule))
    ]
    alone, together = ([g.token_ids for g in run.generations] for run in found)
    return float(alone != together)


def _loop() -> list[Control]:
    shape = TreeShape.of([(0,), (1,)])

    def measure(change: Callable[[Target], Target]) -> float:
        target = toy_model(vocab=4)
        target.probe()  # on the sound model: the probe would find the mistake by itself
        drafter = TableDrafter(shape, "without", 4)
        return engine_distribution(
            change(target), drafter, [3, 1, 2], 4, ONE, "rejection", shape
        ).error

    def adaptive(wrap: Callable[[Drafter], Any]) -> float:
        drafter = wrap(counted_chain(3))  # below the rule: it sees the depth of each row
        return engine_distribution(toy_model(vocab=3), drafter, [1, 2], 4, ONE, shape=CHAIN).error

    def one(name: str, seen: str, wrong: Measure, right: Measure) -> Control:
        return Control(name, "engine enumeration", seen, wrong, right, LOOP)

    rows, leak = commits_wrong_rows, leaks_siblings
    right = lambda: measure(lambda target: target)
    return [
        one("cache keeps the wrong rows", "mutation", lambda: measure(rows), right),
        one("mask lets siblings see each other", "mutation", lambda: measure(leak), right),
        one(
            "rows mixed up above two",
            "1Cat-vLLM #656",
            lambda: in_company(field.rows_mixed_up),
            lambda: in_company(rule_named("rejection")),
        ),
        one(
            "draft length adapted to the tokens just drafted",
            "DSpark, appendix A",
            lambda: adaptive(wrong_drafters.Anticipating),
            lambda: adaptive(lambda d: Adaptive(d, cost=0.27)),
        ),
    ]


def controls() -> list[Control]:
    """Every control whose layer needs no model of the user's."""
    return [
        *_wrong_rules(),
        *_field(),
        *_wrong_drafts(),
        *_loop(),
        *number_controls.below(),
        *number_controls.floor(),
    ]


def measured(
    known: Sequence[Control], memo: Memo, name: str, on_progress: OnProgress
) -> list[dict[str, Any]]:
    """What the layer of every control measures on the wrong code and on the correct one, kept
    in `memo` under a name."""

    def row(control: Control) -> dict[str, Any]:
        wrong, right = control.wrong(), control.right()
        return {
            "name": control.name,
            "layer": control.layer,
            "rejected": wrong > control.limit >= right,
            "p": None,
            "measured": wrong,
            "correct_code": right,
            "limit": control.limit,
            "seen": control.seen,
        }

    return memo.each(name, known, row, named(on_progress, "controls"))
