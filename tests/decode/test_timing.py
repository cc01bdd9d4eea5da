"""Where a run says its time went: every part by a clock that only the part under test
moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.decode.cache import TreeCache
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.records import PARTS, Timing
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.verify import walk

REQUESTED = [
    Request([5, 6, 7, 8, 5, 6, 7], 12, id=0),
    Request([9, 9, 9, 9], 12, id=1),
    Request([1, 2, 1, 2], 7, id=2),
]


@pytest.fixture(scope="module")
def target() -> Target:
    made = load_target(TargetConfig(kind="tiny"), torch.float64)
    made.probe()  # else the first run does, and calls what is counted here
    return made


class Hand:
    """A clock that stands still until somebody moves it; `calls` counts the moves of each
    part.
    """

    def __init__(self) -> None:
        self.now, self.calls = 0.0, dict.fromkeys((*PARTS, "prefill"), 0)

    def __call__(self) -> float:
        return self.now

    def on(self, part: str, function: Any, seconds: float = 1.0) -> Any:
        def moved(*args: Any, **kwargs: Any) -> Any:
            self.calls[part] += 1
            self.now += seconds
            return function(*args, **kwargs)

        return moved


def timed(
    target: Target, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, batch_size: int
) -> tuple[Timing, Hand]:
    """A run in which the parts of every cycle take 2, 3, 5, 7, 11 and 13 seconds a call, and
    the prefill 1000.
    """
    hand, drafter = Hand(), NGram(depth=4)
    target.pack_weights()  # which looks once what the model can do, by passes of its own
    prefill = target.prefill

    def whole_prefill(*args: Any, **kwargs: Any) -> Any:
        hand.now += 1000.0
        return prefill(*args, **kwargs)

    monkeypatch.setattr(target, "prefill", whole_prefill)
    monkeypatch.setattr(target, "score", hand.on("target", target.score, 2.0))
    monkeypatch.setattr(drafter, "propose", hand.on("drafter", drafter.propose, 3.0))
    monkeypatch.setattr(TreeCache, "commit", hand.on("cache", TreeCache.commit, 11.0))
    support = Sampling.support

    def distribution(self: Sampling, scores: Any) -> Any:
        hand.calls["distribution"] += 1
        hand.now += 5.0
        return support(self, scores)

    monkeypatch.setattr(Sampling, "support", distribution)
    message = hand.on("python", lambda *a: None, 13.0)
    run = generate(
        target,
        drafter,
        REQUESTED,
        sampling,
        batch_size=batch_size,
        verify=hand.on("verify", walk, 7.0),
        eos_ids=(),
        on_tokens=message,
        clock=hand,
    )
    assert [len(g.token_ids) for g in run.generations] == [12, 12, 7]
    return run.timing, hand


@pytest.mark.parametrize(
    "sampling, batch_size", [(Sampling(), 1), (Sampling(1.0, repetition_penalty=1.2), 3)]
)
def test_every_part_gets_its_own_seconds(
    target: Target, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, batch_size: int
) -> None:
    timing, hand = timed(target, monkeypatch, sampling, batch_size)
    parts, passes = timing.parts(), timing.cycles
    admitted = -(
        -len(REQUESTED) // batch_size
    )  # each of these draws from one distribution in the prefill
    assert set(parts) == set(PARTS) and passes == hand.calls["target"]
    assert (
        parts["target"] == 2.0 * passes
        and parts["drafter"] == 3.0 * passes
        and parts["cache"] == 11.0 * passes
    )
    assert parts["verify"] == 7.0 * passes == 7.0 * (hand.calls["verify"] - admitted)
    in_prefill = 5.0 * admitted + 7.0 * admitted + 13.0 * len(REQUESTED) + 1000.0 * admitted
    assert timing.prefill_s == in_prefill
    assert parts["distribution"] == 5.0 * (hand.calls["distribution"] - admitted) >= 5.0 * passes
    assert parts["python"] == 13.0 * (hand.calls["python"] - len(REQUESTED))
    assert sum(parts.values()) == timing.decode_s == timing.total_s - timing.prefill_s
    phases = timing.draft_s + timing.target_s + timing.verify_s + timing.commit_s
    assert phases == timing.decode_s, "the phases of a cycle have no gap between them"
    assert len(timing.cycle_s) == passes and sum(timing.cycle_s) == timing.decode_s
    assert len(timing.cycle_nodes) == passes
