"""Watches verification from inside the decode loop: every emitted token with the very logits
it was verified against.

A recorder stands in the place of the rule (`generate(..., verify=recorder,
coins=recorder.coins)`), lets the rule decide and notes what it decided. A test of the rule on
these logits is free of rounding in the model: the distribution that was owed and the token
that came out are those of one pass.

Shape letters: B rows, N nodes, K tokens of one call, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.decode.engine import DecodedRun, Request, Rule
from outrider.decode.rng import Rng
from outrider.decode.sampling import Distribution
from outrider.decode.tree import DraftTree
from outrider.decode.verify import Coins, Verdict
from outrider.decode.verify import verify as run_verify


@dataclass
class Call:
    """One verification. requests: ids of its rows; tokens: committed by it, per row; start:
    where each row's tokens begin among the K; kept: see Recorder."""

    requests: list[int]
    tokens: list[list[int]]
    start: list[int]
    kept: Any


@dataclass
class Emitted:
    """One emitted token: number `place` of row `row` of `call`."""

    call: Call
    row: int
    place: int

    @property
    def token(self) -> int:
        return self.call.tokens[self.row][self.place]

    @property
    def index(self) -> int:
        """Which of the K tokens of its call it is."""
        return self.call.start[self.row] + self.place


def rule_of(name: str | Rule) -> Rule:
    """A rule of decode.verify by its name; a rule stays what it is."""
    return name if callable(name) else functools.partial(run_verify, rule=name)


Keep = Callable[[Tensor, Tensor, list[list[int]]], Any]


class Recorder:
    """A rule that remembers. calls: all verifications so far, in order.

    keep(logits [K, V], tokens [K], histories) says what stays of a call; without it the logits
    themselves do, in the model's own dtype. The histories (all ids before each token) are
    there only with keep.
    """

    def __init__(
        self, rule: str | Rule, requests: Sequence[Request], keep: Keep | None = None
    ) -> None:
        self.rule = rule_of(rule)
        self.keep, self.calls = keep, list[Call]()
        self.texts = {r.id: list(r.prompt) for r in requests}
        self.requested: list[int] = []

    def coins(self, seed: int, requests: Tensor, cycles: Tensor) -> Rng:
        """The random numbers of the next verification, which tell whose rows they are."""
        self.requested = requests.tolist()
        return Rng(seed, requests, cycles)

    def __call__(self, tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
        """See decode.engine.Rule."""
        verdict = self.rule(tree, distribution, rng)
        rows: list[int] = []
        slots: list[int] = []
        call = Call(self.requested, [], [], None)
        histories: list[list[int]] = []
        drafted = tree.tokens.tolist()
        ends = zip(
            verdict.path.tolist(), verdict.length.tolist(), verdict.bonus.tolist(), strict=True
        )
        for b, (path, length, bonus) in enumerate(ends):
            text = self.texts[self.requested[b]]
            call.start.append(len(rows))
            call.tokens.append([*(drafted[b][node] for node in path[:length]), bonus])
            for slot, token in zip(
                [0, *(node + 1 for node in path[:length])], call.tokens[-1], strict=True
            ):
                rows.append(b)
                slots.append(slot)
                if self.keep is not None:
                    histories.append(list(text))
                text.append(token)
        logits = distribution.logits[rows, slots]
        tokens = torch.tensor([t for line in call.tokens for t in line], device=logits.device)
        call.kept = logits if self.keep is None else self.keep(logits, tokens, histories)
        self.calls.append(call)
        return verdict

    def emitted(self, run: DecodedRun, requests: Sequence[Request]) -> list[list[Emitted]]:
        """The tokens of every generation, up to a stop token or the length limit."""
        found: dict[int, list[Emitted]] = {r.id: [] for r in requests}
        for call in self.calls:
            for row, request in enumerate(call.requests):
                found[request] += [
                    Emitted(call, row, place) for place in range(len(call.tokens[row]))
                ]
        return [
            found[request.id][: len(generation.token_ids)]
            for request, generation in zip(requests, run.generations, strict=True)
        ]


def astray(lines: Sequence[Sequence[Emitted]], run: DecodedRun) -> int:
    """Generations that hold something else than verification chose."""
    return sum(
        [e.token for e in line] != g.token_ids
        for line, g in zip(lines, run.generations, strict=True)
    )
