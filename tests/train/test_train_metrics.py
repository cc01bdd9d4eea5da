"""What a run says of its speed: FLOP/s, MFU, memory, a profiler's window."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.jsonl import records
from outrider.train import measure
from outrider.train.measure import Flops
from tests.helpers.training import run


def lines(out: Path) -> list[dict[str, Any]]:
    found = records(out / "metrics.jsonl")
    return [line for line in found if "loss" in line]


def test_flops_of_a_pass_are_those_of_its_products() -> None:
    """One linear layer: 2 m n k forward, as much for each of two gradients; a second pass is
    not counted."""
    flops = Flops("bfloat16", torch.device("cpu"))
    weight = torch.randn(6, 5, requires_grad=True)
    for _ in range(2):
        with flops.counted(torch.ones(4, dtype=torch.bool)):
            x = torch.randn(4, 5, requires_grad=True)
            (x @ weight.T).sum().backward()
    assert flops.total == 3 * 2 * 4 * 5 * 6
    found = flops.rates(1e9, world=2)
    assert found["tokens_per_second_per_device"] == 5e8
    assert found["tflops_per_device"] == pytest.approx(flops.total / 4 * 5e8 / 1e12, rel=1e-3)
    assert "mfu" not in found


def test_mfu_where_the_peak_is_known(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's lines have TFLOP/s and peak memory, and MFU once the device's peak is known."""
    monkeypatch.setattr(measure, "peak_flops", lambda name, dtype: 1e12)
    for line in lines(run(data, tmp_path / "run")):
        assert line["mfu"] == pytest.approx(line["tflops_per_device"], abs=1e-3)
        assert line["tokens_per_second_per_device"] == line["tokens_per_second"]
        assert line["peak_memory_bytes"] > 1 << 20
        shares = {key: value for key, value in line.items() if key.startswith("share_")}
        assert shares["share_head"] > 0 and sum(shares.values()) <= 1


def test_a_formula_that_fails_costs_the_count_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(measure.flop_registry, torch.ops.aten.mm, refused)
    flops = Flops("bfloat16", torch.device("cpu"))
    with flops.counted(torch.ones(4, dtype=torch.bool)):
        assert (torch.ones(4, 5) @ torch.ones(5, 6)).sum() == 120
    assert "tflops_per_device" not in flops.rates(1e9, world=1)


def test_a_window_of_steps_is_traced_and_changes_no_bit(data: Path, tmp_path: Path) -> None:
    plain = run(data, tmp_path / "plain", "steps=4")
    out = run(data, tmp_path / "traced", "steps=4", "profile=[2,3]")
    (trace,) = out.glob("profile/*.json.gz")
    assert not list(plain.glob("profile/*"))
    name = "head/head.safetensors"
    assert (out / name).read_bytes() == (plain / name).read_bytes()
    names = [
        e.get("name", "") for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]
    assert {n for n in names if n.startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }
    assert any("mm" in n for n in names)
    cut = run(data, tmp_path / "run", "steps=2", "profile=[2,50]")
    assert len(list(cut.glob("profile/*"))) == 1
