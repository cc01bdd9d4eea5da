"""Bad input at the engine's door: an error that names the row and the value, and nothing of
that cycle is committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import BatchLimits, Engine, Request, generate
from outrider.decode.models.tiny import tiny_model
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


class Fixed(NoDraft):
    """Proposes the same tree in every cycle."""

    max_nodes, max_depth = 3, 2

    def __init__(self, make: Callable[[int], DraftTree]) -> None:
        super().__init__()
        self.make = make

    def propose(self, *args: Any) -> DraftTree:
        return self.make(self.rows)


def refused(
    target: Target,
    drafter: NoDraft,
    error: type[Exception],
    words: list[str],
    sampling: Sampling = Sampling(1.0),
) -> None:
    engine = Engine(target, drafter, sampling, BatchLimits(3, 16), eos_ids=())
    rows = [engine.join(Request(prompt, 12)) for prompt in ([3, 4, 5], [6, 7], [8])]
    with pytest.raises(error) as found:
        engine.step()
    for word in words:
        assert word in str(found.value), str(found.value)
    assert engine.cache.lengths == [3, 2, 1], "something was committed"  # type: ignore[union-attr]
    assert all(len(row.generation.token_ids) == 1 for row in rows), "more than the prefill's token"


def too_many(rows: int) -> DraftTree:
    return DraftTree.chain(torch.ones(rows, 4, dtype=torch.int64))


def drawn_from_nan(rows: int) -> DraftTree:
    probs = torch.full((rows, 3, VOCAB), 1 / VOCAB)
    probs[1, 1, 9] = NAN
    drawn, row = torch.ones(rows, 3, dtype=torch.bool), torch.arange(3).expand(rows, 3)
    return DraftTree.chain(torch.tensor([[1, 2, 3]] * rows), None, drawn, Proposal(probs, row))


def test_malformed_drafts(target: Target) -> None:
    refused(target, Fixed(too_many), ValueError, ["4 nodes", "budget of 3"])
    words = ["row 1, node 1", "holds NaN or infinity", "nothing was committed"]
    refused(target, Fixed(drawn_from_nan), UserError, words)


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
    target: Target,
    sampling: Sampling,
    place: tuple[int, ...],
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them is not finite, or every token is masked."""
    score = target.score

    def poisoned(*args: Any) -> Step:
        step = score(*args)
        logits = step.logits.clone()
        logits[place] = value
        return dataclasses.replace(step, logits=logits)

    monkeypatch.setattr(target, "score", poisoned)
    refused(target, NoDraft(), UserError, ["row 1", str(value), "nothing was committed"], sampling)


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
def test_settings_are_refused(target: Target, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        sampling = Sampling(**{"temperature": 1.0, **settings})
        Engine(target, NoDraft(), sampling, BatchLimits(1, 8))


def test_requests_outside_the_model(target: Target) -> None:
    for request, words in (
        (Request([3, VOCAB], 4), f"request 0: token {VOCAB}"),
        (Request([-1], 4), "token -1"),
        (Request([3], 4, uncond=[VOCAB + 5]), f"token {VOCAB + 5}"),
        (Request([3], 4, id=1 << 63), f"request 0: its id {1 << 63} is no 64-bit number"),
        (Request([3], 4, id=-(1 << 63) - 1), "is no 64-bit number"),
    ):
        with pytest.raises(UserError, match=words):
            generate(target, NoDraft(), [request], Sampling(1.0))
    for number in ((1 << 63) - 1, -(1 << 63)):
        generate(target, NoDraft(), [Request([3], 2, id=number)], Sampling(1.0))
