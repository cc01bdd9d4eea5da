"""Where the time of a step goes, and what a run says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.heads import head_class
from outrider.train import clock
from outrider.train.clock import PARTS, Clock, exchange_seconds, shares
from outrider.train.loop import fit
from outrider.train.measure import memory
from tests.helpers.training import chats, run_config


class Ticks:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_parts_add_up_over_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(clock, "time", ticks)
    parts = Clock(torch.device("cpu"))
    with parts.part("save"):  # before the step
        ticks.now += 2.0
    for seconds in (1.0, 2.0):
        with parts.part("target"):
            ticks.now += seconds
        with parts.part("head"):
            ticks.now += 0.5
        ticks.now += 10.0  # belongs to no part
    model = SimpleNamespace(
        _get_ddp_logging_data=lambda: {
            "backward_comm_time": 700_000_000,
            "backward_compute_comm_overlap_time": 450_000_000,
        }
    )
    assert exchange_seconds(model) == 0.25 and exchange_seconds(object()) == 0.0
    found = parts.per_step(model)
    assert found == {
        "data": [0.0, 1.0],
        "target": [3.0, 1.0],
        "head": [0.75, 1.0],
        "communication": [0.25, 1.0],
        "save": [2.0, 1.0],
    }
    assert shares({**found, "seconds": [8.0, 1.0]}) == {
        "share_data": 0.0,
        "share_target": 0.3,
        "share_head": 0.075,
        "share_communication": 0.025,
        "share_save": 0.2,
    }
    assert shares({"seconds": [8.0, 1.0], "data": [2.0, 1.0]}) == {
        "share_data": 0.25
    }  # of an older run
    assert parts.take() == dict.fromkeys(PARTS, 0.0)


def test_a_part_inside_another_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target's features, asked for by the head's forward; asked for between the steps they
    count nowhere."""
    ticks = Ticks()
    monkeypatch.setattr(clock, "time", ticks)
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
    found = parts.take()
    assert found["head"] == 5.0 and found["target"] == 2.0 and sum(found.values()) == 7.0


def test_on_a_gpu_nothing_waits_for_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are read once they are over; the others at the next step."""
    done: set[int] = set()

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            self.number, Event.made = Event.made, Event.made + 1

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return self.number in done

        def elapsed_time(self, end: Any) -> float:
            return 1000.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    parts = Clock(torch.device("cuda"))
    for name in ("data", "head", "head"):
        with parts.part(name):
            pass
    done.update({1, 3})
    assert parts.take()["head"] == 1.0
    done.add(5)
    assert parts.take() == {**dict.fromkeys(PARTS, 0.0), "head": 1.0}


def test_a_run_says_what_it_is_and_where_its_time_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory.torch.cuda, "memory_allocated", lambda device: 7)
    monkeypatch.setattr(memory.torch.cuda, "max_memory_allocated", lambda device: 9)
    assert memory.on_gpu(torch.device("cuda")) == {
        "gpu_memory_bytes": 7,
        "gpu_peak_memory_bytes": 9,
    }
    assert memory.on_gpu(torch.device("cpu")) == {}
    fit(run_config(chats(tmp_path / "d.jsonl"), tmp_path / "run"), head_class("medusa"))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    start, steps = lines[0], [line for line in lines if "loss" in line]
    assert start["event"] == "start" and len(steps) == 3
    for key in (
        "config",
        "commit",
        "machine",
        "python",
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "target",
        "data",
        "batches",
        "trainable",
    ):
        assert start[key], key
    assert start["trust_remote_code"] == "off" and len(start["config"]) == 12
    for line in steps:
        found = [line[f"share_{name}"] for name in PARTS]
        assert (
            all(share >= 0 for share in found)
            and 0 < sum(found) <= 1.001
            and line["share_head"] > 0
        )
        assert line["tokens_per_second"] > 0 and not set(line) & set(PARTS)
    said = capfd.readouterr().err
    assert "trainable" in said and "trust_remote_code off" in said and start["config"] in said
