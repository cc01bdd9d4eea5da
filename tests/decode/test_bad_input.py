"""Bad input at the engine's door: an error that names the row and the value, and nothing of
that cycle is committed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.tiny import tiny_model
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.scorer import Step
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, Proposal

VOCAB = 40
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def target() -> Target:
    made = Target(tiny_model(vocab=VOCAB, hidden=32, init_std=0.3))
    made.probe()
    return made


class Fixed:
    """Proposes the same tree in every cycle."""

    name, shape, taps = "fixed", "tree", ()
    max_nodes, max_depth = 3, 2

    def __init__(self, make: Callable[[int], DraftTree]) -> None:
        self.make, self.rows = make, 0

    def reset(self, rows: int, max_len: int) -> None:
        self.rows = 0

    def begin(self, prompts: list[torch.Tensor], sampling: Sampling) -> None:
        self.rows += len(prompts)

    def observe(self, *args: Any) -> None: ...

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)

    def propose(self, budget: torch.Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        return self.make(self.rows)


def watched(
    target: Target, poison: Callable[[Step], None] | None = None
) -> tuple[Target, list[Any]]:
    """A target that notes its cache (first) and every commit (later), and may spoil the logits
    of a tree pass.
    """
    seen: list[Any] = []
    spoiled = copy.copy(target)

    def new_cache(*args: Any, **kwargs: Any) -> Any:
        cache = target.new_cache(*args, **kwargs)
        commit = cache.commit
        cache.commit = lambda path, length: (seen.append("commit"), commit(path, length))  # type: ignore[method-assign]
        seen.append(cache)
        return cache

    def score(*args: Any, **kwargs: Any) -> Step:
        step = target.score(*args, **kwargs)
        step = dataclasses.replace(step, logits=step.logits.clone())
        if poison:
            poison(step)
        return step

    spoiled.new_cache, spoiled.score = new_cache, score  # type: ignore[method-assign]
    return spoiled, seen


def refused(
    target: Target,
    drafter: Any,
    error: type[Exception],
    words: list[str],
    sampling: Sampling = Sampling(1.0),
    poison: Callable[[Step], None] | None = None,
) -> None:
    spoiled, seen = watched(target, poison)
    message: list[Any] = []
    requested = [Request([3, 4, 5], 12, id=0), Request([6, 7], 12, id=1), Request([8], 12, id=2)]
    with pytest.raises(error) as found:
        generate(
            spoiled,
            drafter,
            requested,
            sampling,
            batch_size=3,
            eos_ids=(),
            on_tokens=lambda i, tokens, drafted: message.append(tokens),
        )
    for word in words:
        assert word in str(found.value), str(found.value)
    assert seen[1:] == [] and seen[0].lengths == [3, 2, 1], "something was committed"
    assert len(message) == 3 and all(
        len(tokens) == 1 for tokens in message
    )  # the prefill's token of each row, no more


def tree(
    parents: list[int], tokens: list[int], row: int, size: int | None = None
) -> Callable[[int], DraftTree]:
    """A chain 1, 2, 3 in every row but `row`."""

    def make(rows: int) -> DraftTree:
        up, ids = torch.tensor([[-1, 0, 1]] * rows), torch.tensor([[1, 2, 3]] * rows)
        up[row], ids[row] = torch.tensor(parents), torch.tensor(tokens)
        sizes = torch.full((rows,), 3)
        sizes[row] = 3 if size is None else size
        return DraftTree(ids, up, sizes)

    return make


def sampled(change: Callable[[Proposal], Proposal]) -> Callable[[int], DraftTree]:
    def make(rows: int) -> DraftTree:
        distribution = torch.full((rows, 3, VOCAB), 1 / VOCAB)
        proposal = change(Proposal(distribution, torch.arange(3).expand(rows, 3)))
        return DraftTree.chain(
            torch.tensor([[1, 2, 3]] * rows), None, torch.ones(rows, 3, dtype=torch.bool), proposal
        )

    return make


def spoil(row: int, level: int, token: int, value: float) -> Callable[[Proposal], Proposal]:
    def change(proposal: Proposal) -> Proposal:
        distribution = proposal.probs.clone()
        distribution[row, level, token] = value
        return dataclasses.replace(proposal, probs=distribution)

    return change


DRAFTS: list[tuple[Callable[[int], DraftTree], type[Exception], list[str]]] = [
    (tree([-1, 1, 1], [1, 2, 3], 1), ValueError, ["row 1, node 1", "parent 1"]),
    (tree([-1, 0, 1], [1, 2, 3], 1, size=4), ValueError, ["row 1", "size 4", "0..3"]),
    (
        lambda rows: DraftTree.chain(torch.ones(rows, 4, dtype=torch.int64)),
        ValueError,
        ["4 nodes", "budget of 3"],
    ),
    (
        sampled(lambda p: dataclasses.replace(p, row=p.row + 1)),
        ValueError,
        ["row 0, node 2", "distribution row 3", "outside 0..2"],
    ),
    (
        sampled(spoil(1, 1, 9, NAN)),
        UserError,
        ["row 1, node 1", "holds NaN or infinity", "nothing was committed"],
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), DRAFTS)
def test_malformed_drafts(
    target: Target,
    make: Callable[[int], DraftTree],
    error: type[Exception],
    words: list[str],
) -> None:
    refused(target, Fixed(make), error, words)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("sampling", "place", "value"),
    [
        (Sampling(0.0), (1, 0, 17), NAN),
        (Sampling(1.0, top_p=0.9), (1, 0, 17), INF),
        (Sampling(1.0), (1,), -INF),
    ],
)
def test_bad_logits_of_one_row(
    target: Target, sampling: Sampling, place: tuple[int, ...], value: float
) -> None:
    """One of them is not finite, or every token is masked."""

    def poison(step: Step) -> None:
        step.logits[place] = value

    words = ["row 1", str(value), "nothing was committed"]
    refused(target, NoDraft(), UserError, words, sampling, poison)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"top_k": VOCAB + 1}, f"top_k={VOCAB + 1}"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"temperature": 1e-40}, "temperature=1e-40: must be 0 .greedy. or at least 1e-37"),
        ({"top_k": NAN}, "top_k=nan"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ],
)
def test_settings_are_refused_before_anything_runs(
    target: Target, settings: dict[str, Any], word: str
) -> None:
    spoiled, seen = watched(target)
    with pytest.raises(UserError, match=word):
        generate(
            spoiled, NoDraft(), [Request([3], 4)], Sampling(**{"temperature": 1.0, **settings})
        )
    assert seen == []


def test_prompts_outside_the_model(target: Target) -> None:
    spoiled, seen = watched(target)
    for request, words in (
        (Request([3, VOCAB], 4), f"request 0: token {VOCAB}"),
        (Request([-1], 4), "token -1"),
        (Request([3], 4, uncond=[VOCAB + 5]), f"token {VOCAB + 5}"),
    ):
        with pytest.raises(UserError, match=words):
            generate(spoiled, NoDraft(), [request], Sampling())
    assert seen == []


def test_ids_of_requests_are_numbers_of_64_bits(target: Target) -> None:
    for number in (1 << 63, -(1 << 63) - 1, 10**30):
        with pytest.raises(UserError, match=f"request 0: its id {number} is no 64-bit number"):
            generate(target, NoDraft(), [Request([3], 4, id=number)], Sampling(1.0))
    for number in ((1 << 63) - 1, -(1 << 63)):
        generate(target, NoDraft(), [Request([3], 2, id=number)], Sampling(1.0))
