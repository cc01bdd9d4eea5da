"""The exact output distribution of the whole decode loop on a toy model: every branch of
drafting, verification, stopping.

All branches of one round run as one batch of requests; a request's id is the number of its
branch. The distribution that comes out is compared with the product of independent plain passes,
one sequence at a time.

Shape letters: B live rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.decode.adaptive import Wrapped
from outrider.decode.drafters import Drafter
from outrider.decode.engine import Request, Rule, generate
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.decode.verify import verify
from outrider.scripts.certificate import transforms
from outrider.scripts.certificate.enumerator import (
    Branches,
    Drafted,
    Script,
    largest_difference,
    naive_distribution,
)

CHUNK = 512  # branches in one batch


class PaddingAwareDrafter(Wrapped):
    """A drafter that marks which of its draws are padding (levels beyond a row's
    budget). What lowers budgets goes around it."""

    def __init__(self, drafter: Drafter, nodes_at: TreeShape | None) -> None:
        super().__init__(drafter)
        self.nodes_at = nodes_at

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        size = budget.clamp(min=0) if self.nodes_at is None else self.nodes_at.size_at(budget)
        rng.levels = size.tolist()  # type: ignore[attr-defined]
        return self.inner.propose(budget, sampling, rng)


class TableDrafter:
    """A drafter without a model: a static tree below the last committed token of each row, drawn
    from a random table [V, V] of distributions of the next token given its parent. scheme: see
    enumerator.Case. See decode.drafters.Drafter."""

    taps: tuple[int, ...] = ()

    def __init__(self, shape: TreeShape, scheme: str, vocab: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = 1.5 * torch.randn(vocab, vocab, dtype=torch.float64, generator=generator)
        self.last = torch.zeros(0, dtype=torch.int64)
        self.tree, self.name = shape, f"table-{scheme}"
        self.shape = "tree" if any(max(p) for p in shape.paths) else "chain"
        self.max_nodes, self.max_depth = len(shape), shape.depth
        self.drafted = Drafted(shape, scheme, table.softmax(-1), lambda above, token: token)

    def reset(self, rows: int, max_len: int) -> None:
        self.last = self.last[:0]

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.last = torch.cat([self.last, torch.stack([prompt[-1] for prompt in prompts])])

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        self.last[rows] = tokens.gather(1, n[:, None] - 1)[:, 0]

    def select(self, rows: list[int]) -> None:
        self.last = self.last[rows]

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return self.drafted.tree(self.last, self.tree.size_at(budget), rng)[0]


def toy_model(
    vocab: int = 8, seed: int = 0, hidden: int = 16, layers: int = 2, **changes: Any
) -> Target:
    """Return a two-layer float64 llama with `vocab` tokens and no tokenizer; token 0 ends a
    sequence."""
    from outrider.decode.models.tiny import tiny_model

    model = tiny_model(
        "llama",
        layers=layers,
        hidden=hidden,
        heads=2,
        kv_heads=1,
        vocab=vocab,
        context=64,
        init_std=0.35,
        seed=seed,
        eos_token_id=0,
        **changes,
    )
    model.generation_config.eos_token_id = 0
    return Target(model.double())


@dataclass
class EngineDistribution:
    """error: of any output's probability. outputs: with mass. branches: runs of the loop."""

    error: float
    outputs: int
    branches: int


def engine_distribution(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    length: int,
    sampling: Sampling,
    rule: Rule = verify,
    shape: TreeShape | None = None,
    guidance: float | None = None,
    **more: Any,
) -> EngineDistribution:
    """Exact distribution of `length` tokens against plain passes. shape: the tree when not a
    chain. more: options of `decode.engine.Engine`."""
    distribution: dict[tuple[int, ...], float] = {}
    todo: list[Script] = [{}]
    branches = 0
    while todo:
        scripts, todo = todo[:CHUNK], todo[CHUNK:]
        walk = Branches(scripts)
        requests = [Request(prompt, length, id=i) for i in range(len(scripts))]
        how: dict[str, Any] = {"verify": rule, "guidance": guidance, "coins": walk.coins, **more}
        counted = PaddingAwareDrafter(drafter, shape)
        run = generate(target, counted, requests, sampling, batch_size=len(scripts), **how)
        for out, weight in zip(run.generations, walk.weight, strict=True):
            key = tuple(out.token_ids)
            distribution[key] = distribution.get(key, 0.0) + weight
        todo += walk.new
        branches += len(scripts)
    truth = plain_distribution(target, prompt, length, sampling, guidance)
    return EngineDistribution(largest_difference(distribution, truth), len(distribution), branches)


@torch.no_grad()
def plain_distribution(
    target: Target,
    prompt: list[int],
    length: int,
    sampling: Sampling,
    guidance: float | None = None,
) -> dict[tuple[int, ...], float]:
    """Return the target's own distribution of up to `length` tokens (a stop token ends
    them), by one plain pass per prefix, two with guidance: the second one sees the prompt's
    last token and what follows it."""
    done: dict[tuple[int, ...], float] = {}
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while todo:
        prefix, mass = todo.pop()
        if len(prefix) == length or (prefix and prefix[-1] in target.eos_ids):
            done[prefix] = mass
            continue
        logits = _last(target, [*prompt, *prefix])
        if guidance is not None:
            free = _last(target, [prompt[-1], *prefix]).log_softmax(-1)
            logits = free + guidance * (logits.log_softmax(-1) - free)
        logits = transforms.processed(logits[None], sampling, [[*prompt, *prefix]])[0]
        distribution = naive_distribution(logits, sampling).tolist()
        todo += [((*prefix, x), mass * p) for x, p in enumerate(distribution) if p]
    return done


def _last(target: Target, ids: list[int]) -> Tensor:
    """Return logits [V] behind a text, of a pass of its own."""
    logits: Tensor = target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits
