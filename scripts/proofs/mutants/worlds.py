"""What a mutant is tried on: exact worlds, unit tests, certificates of a tiny target
(nursery.py forks the trials).

Imported inside a copy of the code, one edit of which may be wrong: nothing here trusts decode/
to be right.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from decode.adaptive import Adaptive
from decode.drafters import Drafter, DraftModel, NGram
from decode.grow import Form
from decode.models.tiny import tiny_model
from decode.price import Price
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import TreeShape
from decode.union import Union
from decode.verify import RULES, verify
from heads.base import Head
from heads.eagle.head import Eagle3Head, EagleConfig
from heads.names import Draft
from heads.parallel.medusa import MedusaConfig, MedusaHead
from scripts.common.parts import Parts
from scripts.proofs import certificate
from scripts.proofs.confident import Confident, ConfidentTable
from scripts.proofs.engine_law import TableDrafter, counted_chain, engine_law, toy_model
from scripts.proofs.enumerator import Case, enumerate_case
from scripts.proofs.extremes import TEMPERATURES, Extreme

# limits of the exact law: float64, float32, the whole loop
EXACT, ROUNDED, LOOP = 1e-12, 1e-6, 1e-9
SMALL = TreeShape.of([(0,), (1,), (0, 0)])
BUSHY = TreeShape.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PENALTY = Sampling(1.0, repetition_penalty=1.3)


# --- enumeration


def enumeration(cases: int = 80, extremes: int = 1) -> None:
    """The exact law of one verification on worlds, and of the whole loop with every drafter."""
    generator = torch.Generator().manual_seed(11)
    for number in range(cases):
        _exact(Case.random(generator), EXACT, f"world {number}")
    other = torch.Generator().manual_seed(12)
    for number in range(cases // 4):
        _exact(Confident.random(other), EXACT, f"world {number} at a price")
    for dtype, limit in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
        for number in range(extremes * len(TEMPERATURES)):
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            _exact(Extreme.random(generator, temperature, dtype, dtype), limit, f"extreme {number}")
    target = toy_model()
    for name, make, shape, sampling, guidance in LOOPS:
        found = engine_law(
            target, make(target), [3, 1, 4], 3, sampling, "traversal", shape, guidance
        )
        assert found.error <= LOOP, f"loop, {name}: off by {found.error:.3g}"


def _exact(case: Case, limit: float, name: str) -> None:
    for rule in RULES:
        error = enumerate_case(case, functools.partial(verify, rule=rule)).error
        assert error <= limit, f"{name}, {rule}: off by {error:.3g}"


def small_lm(target: Target, shape: TreeShape | None = None) -> DraftModel:
    """A smaller model: a chain, or a tree drawn over some of the target's tokens."""
    vocab = target.vocab_size
    model = tiny_model(layers=1, hidden=16, heads=2, kv_heads=1, vocab=vocab, init_std=0.35, seed=5)
    draft = Target(model.to(target.dtype))
    if shape is None:
        return DraftModel(draft, 3)
    ids = torch.arange(vocab)[torch.arange(vocab) % 4 != 1]
    return DraftModel(draft, Form.tree(shape.depth, len(shape), static=shape), ids=ids)


def medusa(target: Target, shape: TreeShape, markov_rank: int = 0) -> Drafter:
    """Medusa heads whose weights have moved from their start, over most of the vocabulary."""
    size = target.vocab_size - target.vocab_size // 4
    cfg = MedusaConfig(heads=shape.depth, draft_vocab=size, markov_rank=markov_rank)
    head = MedusaHead.for_target(target, cfg, torch.arange(target.vocab_size) + 1)
    return _drafter(head, target, shape)


def eagle(target: Target, shape: TreeShape) -> Drafter:
    """An EAGLE-3 head of random weights, over most of the vocabulary."""
    size = target.vocab_size - target.vocab_size // 4
    cfg = EagleConfig(
        taps=[0, 1, 2], draft_vocab=size, nodes=len(shape), depth=shape.depth, width=2
    )
    head = Eagle3Head.for_target(target, cfg, torch.arange(target.vocab_size) + 1)
    return _drafter(head, target, shape)


def _drafter(head: Head, target: Target, shape: TreeShape) -> Drafter:
    generator = torch.Generator().manual_seed(3)
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    head.calibration = {"paths": [list(p) for p in shape.paths]}
    found: Drafter = head.drafter(target, Draft(shape="tree"))
    return found


def _adaptive(target: Target) -> Any:
    return Adaptive(counted_chain(8), cost=0.27)


def _confident(target: Target) -> Any:
    price = Price(0.15, 0.3)
    return ConfidentTable(Form("tree", SMALL.depth, len(SMALL), SMALL, price=price), 8)


Make = Callable[[Target], Any]
Loop = tuple[str, Make, TreeShape | None, Sampling, float | None]
LOOPS: tuple[Loop, ...] = (
    ("small model, chain", small_lm, None, Sampling(0.8, top_k=5, top_p=0.9), None),
    ("small model, tree", lambda t: small_lm(t, SMALL), SMALL, Sampling(1.0), None),
    ("medusa", lambda t: medusa(t, SMALL), SMALL, Sampling(1.3), None),
    ("medusa with Markov term", lambda t: medusa(t, SMALL, 2), SMALL, Sampling(1.0), None),
    ("eagle", lambda t: eagle(t, SMALL), SMALL, Sampling(1.0), None),
    ("table, iid", lambda t: TableDrafter(SMALL, "iid", 8), SMALL, Sampling(1.0), 1.5),
    ("table, hybrid", lambda t: TableDrafter(SMALL, "hybrid", 8), SMALL, PENALTY, None),
    ("adaptive", _adaptive, TreeShape.chain(2), Sampling(1.0), None),
    ("tree at a price", _confident, SMALL, Sampling(1.0), None),
)


# --- certificate

TOKENS = 20_000


@dataclass(frozen=True)
class Certified:
    """One target, drafter and setting to certify. target: changes of the tiny model."""

    name: str
    make: Make
    sampling: Sampling
    verify: str = "traversal"
    guidance: float | None = None
    vocab: int = 64
    arch: str = "llama"
    window: int = 0

    def target(self) -> Target:
        more: dict[str, Any] = {"sliding_window": self.window} if self.window else {}
        size = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": self.vocab}
        return Target(tiny_model(self.arch, **size, context=256, init_std=0.3, **more))

    def plan(self) -> certificate.Plan:
        return certificate.Plan(
            sampling=self.sampling,
            verify=self.verify,
            tokens=TOKENS,
            max_new_tokens=32,
            batch_size=400,
            cases=40,
            greedy_prompts=32,
            greedy_tokens=24,
            alpha=1e-4,
            detect=0.1,
            seed=0,
            guidance=self.guidance,
        )

    def prompts(self) -> list[list[int]]:
        """Of unlike lengths, so that the rows of a batch are ragged."""
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(1, 16, (32,), generator=generator).tolist()
        return [torch.randint(3, self.vocab, (n,), generator=generator).tolist() for n in sizes]


CERTIFIED = (
    Certified("small model, tree", lambda t: small_lm(t, BUSHY), Sampling(1.0)),
    Certified(
        "medusa, top-p, rejection",
        lambda t: medusa(t, BUSHY),
        Sampling(4.0, top_p=0.95),  # some 285 of 320 tokens: more than the first candidates hold
        "rejection",
        vocab=320,
    ),
    Certified(
        "eagle, guidance and penalty",
        lambda t: eagle(t, BUSHY),
        Sampling(0.7, repetition_penalty=1.2),
        guidance=1.5,
    ),
    Certified(
        "adaptive chain, window, top-k",
        lambda t: Adaptive(small_lm(t)),
        Sampling(0.8, top_k=20, min_p=0.02),
        arch="mistral",
        window=12,
    ),
    Certified("n-gram, whole vocabulary", lambda t: NGram(), Sampling(1.0), vocab=1280),
    Certified(
        "small model and n-grams, rejection",
        lambda t: Union([small_lm(t, SMALL), NGram(nodes=4)]),
        Sampling(1.0),
        "rejection",
        vocab=32,
    ),
)


def certify(setting: Certified, tokens: int, parts: Parts) -> dict[str, str]:
    """The layers of the certificate that reject, with their reasons; the others are spared
    where the exact one does.
    parts: may hold what correct code found already, and receives what this run finds."""
    plan, target = dataclasses.replace(setting.plan(), tokens=tokens), setting.target()
    exact = parts.once("exact", lambda: certificate.exact_layer(plan, _unwatched))
    if not exact["passed"]:
        return {"exact": exact["why"]}
    world = certificate.open_world(target, setting.prompts(), plan, _unwatched, parts)
    found = certificate.layers(world, setting.make(target), plan, _unwatched, parts)
    return {row["name"]: row["why"] for row in found.layers if not row["passed"]}


def _unwatched(name: str, done: int, total: int) -> None:
    pass
