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
        with parts.part("head"):
            ticks.now += seconds
        ticks.now += 10.0  # belongs to no part
    found = parts.per_step()
    assert found == {
        "data": [0.0, 1.0],
        "head": [3.0, 1.0],
        "communication": [0.0, 1.0],
        "save": [2.0, 1.0],
    }
    whole = shares({**found, "seconds": [8.0, 1.0]})
    assert whole["share_head"] == 0.3 and whole["share_save"] == 0.2
    assert parts.per_step() == {name: [0.0, 1.0] for name in PARTS}
