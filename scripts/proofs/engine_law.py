"""The exact output law of the whole decode loop on a toy model: every branch of drafting,
verification, stopping.

All branches of one round run as one batch of requests; a request's id is the number of its
branch. Where a script does not say how a random choice went, the first possible outcome is
taken and the others join the next round. The law that comes out is compared with the product
of independent plain passes, one sequence at a time.

Shape letters: B live rows, V vocabulary, S outcomes of one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.engine import Request, Rule, generate
from decode.rng import Rng
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import DraftTree, Proposal, TreeShape
from decode.wrapped import Wrapped
from scripts.proofs.enumerator import largest_difference, naive_law

Address = tuple[int, str, int, int]  # cycle, purpose, node, how often it was asked before
CHUNK = 512  # branches in one batch


class _Cycle:
    """The coins of one cycle: every choice has an address, so that a replay meets the same
    ones in any batch.
    """

    def __init__(self, walk: _Walk, branches: list[int], cycles: list[int]) -> None:
        self.walk, self.branches, self.cycles = walk, branches, cycles
        self.asked: dict[tuple[int, str, int], int] = {}
        self.levels: list[int] | None = (
            None  # draft levels that matter, per row; deeper draws are padding
        )

    def _choose(self, purpose: str, law: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        law = law.to(torch.float64)
        law = law / law.sum(-1, keepdim=True)
        out = []
        for p, row, number in zip(law, rows.tolist(), node.tolist(), strict=True):
            options = p.nonzero()[:, 0].tolist()
            key = (row, purpose, number)
            again = self.asked.get(key, 0)
            self.asked[key] = again + 1
            padding = purpose == "draft" and self.levels is not None and number >= self.levels[row]
            if len(options) <= 1 or padding:
                out.append(options[0] if options else 0)
                continue
            address = (self.cycles[row], purpose, number, again)
            out.append(self.walk.choose(self.branches[row], address, p, options))
        return torch.tensor(out, dtype=torch.int64)

    def accept(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        p = probability.to(torch.float64).clamp(0, 1)
        return self._choose("accept", torch.stack([1 - p, p], 1), rows, node) == 1

    def first(self, probability: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        p = probability.to(torch.float64).clamp(0, 1)
        before = torch.cat([torch.ones_like(p[:, :1]), (1 - p).cumprod(1)[:, :-1]], 1)
        # Outcomes are noted as nodes: where nodes stand depends on the rows beside them.
        place = (node + 1).argsort(1)
        law = (p * before).gather(1, place)
        chosen = self._choose("first", law, rows, torch.zeros_like(rows))
        return place.gather(1, chosen[:, None])[:, 0]

    def draw(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self._choose("draw", weights, rows, node)

    def draft(self, weights: Tensor, rows: Tensor, node: Tensor) -> Tensor:
        return self._choose("draft", weights, rows, node)


class _Walk:
    """One round: a script of outcomes per branch, and the alternatives found on the way."""

    def __init__(self, scripts: Sequence[dict[Address, int]]) -> None:
        self.scripts = scripts
        self.taken: list[dict[Address, int]] = [{} for _ in scripts]
        self.weight = [1.0] * len(scripts)
        self.new: list[dict[Address, int]] = []

    def coins(self, seed: int, requests: Tensor, cycles: Tensor) -> Any:
        return _Cycle(self, requests.tolist(), cycles.tolist())

    def choose(self, branch: int, address: Address, p: Tensor, options: list[int]) -> int:
        taken, pick = self.taken[branch], self.scripts[branch].get(address)
        if pick is None:
            pick = options[0]
            self.new += [{**taken, address: other} for other in options[1:]]
        taken[address] = pick
        self.weight[branch] *= float(p[pick])
        return pick


class Counted(Wrapped):
    """A drafter that tells the coins which of its draws are padding (levels beyond a row's
    budget). What lowers budgets goes around it."""

    def __init__(self, drafter: Drafter, nodes_at: TreeShape | None) -> None:
        super().__init__(drafter)
        self.nodes_at = nodes_at

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        size = budget.clamp(min=0) if self.nodes_at is None else self.nodes_at.size_at(budget)
        rng.levels = size.tolist()  # type: ignore[attr-defined]
        return self.inner.propose(budget, sampling, rng)


class TableDrafter:
    """A static tree drawn from a fixed random table of laws (the next token given its parent).
    No model.

    scheme: "top" (deterministic), "iid", "without" (replacement) or "hybrid" (the best
    candidate, then draws from what is left). It proposes below the last committed token of
    each row.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, shape: TreeShape, scheme: str, vocab: int, seed: int = 0) -> None:
        self.tree, self.scheme, self.name = shape, scheme, f"table-{scheme}"
        self.shape = "tree" if any(max(p) for p in shape.paths) else "chain"
        self.max_nodes, self.max_depth = len(shape), shape.depth
        generator = torch.Generator().manual_seed(seed)
        self.table = (
            torch.randn(vocab, vocab, dtype=torch.float64, generator=generator).mul(1.5).softmax(-1)
        )
        self.last: list[int] = []

    def reset(self, rows: int, max_len: int) -> None:
        self.last = []

    def begin(self, prompts: list[Tensor], sampling: Sampling) -> None:
        self.last += [int(p[-1]) for p in prompts]

    def observe(self, tokens: Tensor, feats: Tensor | None, n: Tensor, rows: slice) -> None:
        for b, new, count in zip(
            range(rows.start, rows.stop), tokens.tolist(), n.tolist(), strict=True
        ):
            self.last[b] = new[count - 1]

    def select(self, rows: list[int]) -> None:
        self.last = [self.last[b] for b in rows]

    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        rows, n = len(self.last), len(self.tree)
        every = torch.arange(rows)
        slots = torch.zeros(rows, n + 1, dtype=torch.int64)
        slots[:, 0] = torch.tensor(self.last)
        law = self.table.new_zeros(rows, n + 1, self.table.shape[0])
        law[:, :, 0] = 1
        left = law.clone()
        sampled = torch.zeros(rows, n, dtype=torch.bool)
        parents = self.tree.parents(torch.device("cpu"))[0].tolist() if n else []
        for i, parent in enumerate(parents):
            above, rank = parent + 1, self.tree.paths[i][-1]
            if rank == 0:
                law[:, above] = left[:, above] = self.table[slots[:, above]]
            if self.scheme == "top" or (self.scheme == "hybrid" and rank == 0):
                token = left[:, above].argmax(1)
            else:
                token = rng.draft(left[:, above], every, torch.full((rows,), i))
                sampled[:, i] = True
            if self.scheme != "iid":
                left[every, above, token] = 0
            slots[:, i + 1] = token
        row = (torch.tensor(parents, dtype=torch.int64) + 1).expand(rows, n)
        proposal = Proposal(law, row, replacement=self.scheme == "iid")
        return DraftTree.static(
            self.tree, slots[:, 1:], self.tree.size_at(budget), sampled, proposal
        )


def toy_model(
    vocab: int = 8, seed: int = 0, hidden: int = 16, layers: int = 2, **changes: Any
) -> Target:
    """A two-layer float64 llama with `vocab` tokens and no tokenizer; token 0 ends a sequence."""
    from decode.models.tiny import tiny_model

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
class EngineLaw:
    """error: largest difference of any output's probability. outputs: outputs with mass.
    branches: runs of the loop.
    """

    error: float
    outputs: int
    branches: int


def engine_law(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    length: int,
    sampling: Sampling,
    verify: str | Rule = "traversal",
    shape: TreeShape | None = None,
    guidance: float | None = None,
) -> EngineLaw:
    """Exact law of `length` tokens after `prompt`, against plain passes. shape: the static
    tree when not a chain.
    """
    law: dict[tuple[int, ...], float] = {}
    todo: list[dict[Address, int]] = [{}]
    branches = 0
    while todo:
        scripts, todo = todo[:CHUNK], todo[CHUNK:]
        walk = _Walk(scripts)
        requests = [Request(prompt, length, id=i) for i in range(len(scripts))]
        run = generate(
            target,
            Counted(drafter, shape),
            requests,
            sampling,
            batch_size=len(scripts),
            verify=verify,
            guidance=guidance,
            coins=walk.coins,
        )
        for out, weight in zip(run.generations, walk.weight, strict=True):
            law[tuple(out.token_ids)] = law.get(tuple(out.token_ids), 0.0) + weight
        todo += walk.new
        branches += len(scripts)
    truth = plain_law(target, prompt, length, sampling, guidance)
    return EngineLaw(largest_difference(law, truth), len(law), branches)


@torch.no_grad()
def plain_law(
    target: Target,
    prompt: list[int],
    length: int,
    sampling: Sampling,
    guidance: float | None = None,
) -> dict[tuple[int, ...], float]:
    """The target's own law of up to `length` tokens (a stop token ends them), by one plain
    pass per prefix, two with
    guidance: the second one sees the prompt's last token and what follows it."""
    done: dict[tuple[int, ...], float] = {}
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while todo:
        prefix, mass = todo.pop()
        if len(prefix) == length or (prefix and prefix[-1] in target.eos_ids):
            done[prefix] = mass
            continue
        logits = target.model(torch.tensor([[*prompt, *prefix]]), use_cache=False).logits[0, -1]
        if guidance is not None:
            free = (
                target.model(torch.tensor([[prompt[-1], *prefix]]), use_cache=False)
                .logits[0, -1]
                .log_softmax(-1)
            )
            logits = free + guidance * (logits.log_softmax(-1) - free)
        for token in {*prompt, *prefix} if sampling.repetition_penalty != 1 else ():
            penalty = sampling.repetition_penalty
            logits[token] = (
                logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
            )
        todo += [
            ((*prefix, x), mass * p)
            for x, p in enumerate(naive_law(logits, sampling).tolist())
            if p
        ]
    return done
