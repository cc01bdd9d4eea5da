"""Where the time of a step goes, and what a run says of itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider.train import metrics
from outrider.train.metrics import PARTS, Clock, shares


def test_parts_add_up_over_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = SimpleNamespace(now=0.0)
    ticks.perf_counter = lambda: ticks.now
    monkeypatch.setattr(metrics, "time", ticks)
    parts = Clock(torch.device("cpu"))
    with parts.part("save"):  # before the step
        ticks.now += 2.0
    for seconds in (1.0, 2.0):
        with parts.part("target"):
            ticks.now += seconds
        with parts.part("head"):
            ticks.now += 0.5
        ticks.now += 10.0  # belongs to no part
    found = parts.per_step()
    assert found == {
        "data": [0.0, 1.0],
        "target": [3.0, 1.0],
        "head": [1.0, 1.0],
        "communication": [0.0, 1.0],
        "save": [2.0, 1.0],
    }
    whole = shares({**found, "seconds": [8.0, 1.0]})
    assert whole["share_target"] == 0.3 and whole["share_save"] == 0.2
    assert parts.per_step() == {name: [0.0, 1.0] for name in PARTS}


def test_a_part_inside_another_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target's features, asked for by the head's forward; asked for between the steps they
    count nowhere."""
    ticks = SimpleNamespace(now=0.0)
    ticks.perf_counter = lambda: ticks.now
    monkeypatch.setattr(metrics, "time", ticks)
    parts = Clock(torch.device("cpu"))

    def features(seconds: float) -> float:
        ticks.now += seconds
        return seconds

    target = SimpleNamespace(features=features)
    parts.watch(target)  # type: ignore[arg-type]  # what it asks of one
    assert target.features(7.0) == 7.0
    with parts.part("head"):
        ticks.now += 1.0
        assert target.features(2.0) == 2.0
        ticks.now += 4.0
    found = {name: seconds for name, (seconds, _) in parts.per_step().items()}
    assert found["head"] == 5.0 and found["target"] == 2.0 and sum(found.values()) == 7.0
