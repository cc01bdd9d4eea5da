"""Random worlds whose drafters come to NaN or infinity behind some tokens, and what the decode loop
makes of them, by enumeration."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decode.adaptive import Adaptive, Wrapped
from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import Drafter
from outrider.decode.grow import Form, Nodes
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.union import Union
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.scripts.certificate.enumerator import SCHEMES
from tests.contract.cases import CASES
from tests.helpers.engine_distribution import (
    EngineDistribution,
    TableDrafter,
    engine_distribution,
    toy_model,
)

VALUES = (math.nan, math.inf, -math.inf)
SHAPES = [
    [[0], [0, 0]],
    [[0], [0, 0], [0, 0, 0]],
    [[0], [1], [0, 0]],
    [[0], [1], [0, 0], [1, 0]],
    [[0], [1], [2], [0, 0], [0, 1]],
]
HEADS = [name for name in CASES if "lora" not in name]


@dataclass
class Finite:
    """Random numbers that draw as if what is not finite had no mass: what is drawn there may be
    anything."""

    coins: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coins, name)

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self.coins.draft(weights.nan_to_num(0.0, 0.0, 0.0).clamp(min=0), rows, node)  # type: ignore[no-any-return]


class Draws(Wrapped):
    """Draws with `Finite` numbers, and tells them which of its draws are padding."""

    def __init__(self, drafter: Drafter, nodes_at: TreeShape) -> None:
        super().__init__(drafter)
        self.nodes_at = nodes_at

    def propose(self, budget: Tensor, sampling: Sampling, rng: Any) -> DraftTree:
        if isinstance(self.inner, DraftModel):  # whose context may end before the draft
            most = self.inner.draft.context_length + 1
            rows = zip(self.inner.cache.lengths, self.inner.blind, strict=True)
            room = torch.tensor([0 if blind else most - have for have, blind in rows])
            budget = torch.minimum(budget, room)
        rng.levels = self.nodes_at.size_at(budget.clamp(min=0)).tolist()
        return self.inner.propose(budget, sampling, Finite(rng))


def spoil(values: Tensor, ill: Tensor, value: float, entry: int | None) -> Tensor:
    """Return `values` [.., V] with `value` in the rows `ill` [..], whole or in one entry."""
    here = ill[..., None].expand_as(values).clone()
    if entry is not None:
        here &= torch.arange(values.shape[-1]) == entry
    return values.masked_fill(here, value)


def spoil_levels(drafter: Any, ill: list[int], value: float, entry: int | None) -> None:
    """What `drafter` knows of the children of the tokens `ill` is spoilt."""
    level = drafter.level

    def spoilt(nodes: Nodes) -> Tensor:
        logits = level(nodes)
        bad = torch.isin(nodes.tokens, torch.tensor(ill))
        if logits.shape[1] == 1:
            bad = bad.any(1, keepdim=True)
        return spoil(logits, bad, value, entry)

    drafter.level = spoilt


def small_head(name: str, target: Target, shape: TreeShape) -> Any:
    """A drafter of untrained, moved weights, of a tree of this shape."""
    cfg = replace(CASES[name].config, draft_vocab=0)
    torch.manual_seed(0)
    head = head_class(cfg.kind).for_target(target, cfg, torch.ones(target.vocab_size))
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight += 0.3 * torch.randn_like(weight)
    head.tree = lambda nodes, depth: shape
    return head.eval().drafter(target, DraftSpec(shape="tree", nodes=len(shape)))


def small_draft(dice: random.Random, vocab: int, form: Form) -> DraftModel:
    """A separate model whose context and whose tokens may end elsewhere than the target's; never
    the target itself, for branches that only rounding opens are none."""
    other = vocab + dice.choice([0, 0, 1, -1 if vocab > 3 else 0])
    draft = toy_model(other, seed=100 + dice.randrange(99), layers=1)
    draft.probe()
    draft.context_length = dice.choice([64, 64, 3, 4])
    return DraftModel(draft, form, vocab_size=vocab)


@dataclass
class World:
    """A target, a drafter that is ill behind some tokens, and how they decode."""

    words: str
    target: Target
    drafter: Drafter
    shape: TreeShape | None
    sampling: Sampling
    length: int
    guidance: float | None

    @staticmethod
    def random(seed: int) -> World:
        dice = random.Random(seed)
        vocab, length = dice.choice([(2, 4), (2, 5), (3, 3), (4, 3)])
        kind = dice.choice(["table", "table", "draft", "union", "pair", "adaptive", "head"])
        if kind == "head":
            vocab, length = 3, 3
        ill = dice.sample(range(vocab), dice.choice([1, 1, vocab - 1]))
        value, entry = dice.choice(VALUES), dice.choice([None, dice.randrange(vocab)])
        target = toy_model(vocab, seed=dice.randrange(99), layers=1 + (kind == "head"))
        if dice.random() < 0.8:  # else token 0 ends an answer
            target.eos_ids = ()
        temperature, settings = dice.choice([0.5, 1.0, 1.0, 2.0]), [{}] * 4
        settings += [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalty": 1.3}]
        sampling = Sampling(temperature, **dice.choice(settings))
        paths = dice.choice([p for p in SHAPES if vocab > max(map(max, p))])
        shape, scheme = TreeShape.of(paths), dice.choice([*SCHEMES, "iid", "without", "without"])
        drafter: Any
        if kind == "draft":
            scheme = ""
            form = Form("tree", shape.depth, len(shape), shape)
            drafter = small_draft(dice, vocab, form)
            spoil_levels(drafter, ill, value, entry)
        elif kind == "head":
            scheme = dice.choice(HEADS)
            shape = TreeShape.of(dice.choice([[[0], [0, 0]], [[0], [1], [0, 0]]]))
            drafter = small_head(scheme, target, shape)
            spoil_levels(drafter, ill, value, entry)
        else:
            drafter = TableDrafter(shape, scheme, vocab, dice.randrange(99))
            table, bad = drafter.drafted, torch.isin(torch.arange(vocab), torch.tensor(ill))
            if scheme == "top":  # of the least numbers it takes one twice
                value = abs(value)
            table.distributions = spoil(table.distributions, bad, value, entry)
        drafter = Draws(drafter, shape)
        if kind == "union":
            drafter = Union([drafter, NGram(depth=2, nodes=dice.choice([0, 3]))])
        elif kind == "pair":
            second = small_draft(dice, vocab, Form.tree(2, nodes=3, width=2))
            spoil_levels(second, ill, value, entry)
            drafter = Union([drafter, second])
        elif kind == "adaptive":
            drafter = Adaptive(drafter, cost=dice.choice([0.05, 0.3]))
        guidance = dice.choice([None, None, 1.5])
        words = f"{seed}: {kind} {scheme} {shape.paths} V={vocab} ill={ill} {value} {entry}"
        return World(words, target, drafter, shape, sampling, length, guidance)

    def enumerated(self) -> EngineDistribution:
        """The exact distribution of what the loop gives."""
        return engine_distribution(
            self.target,
            self.drafter,
            [1, 1],
            self.length,
            self.sampling,
            shape=self.shape,
            guidance=self.guidance,
            cuts=True,
        )
