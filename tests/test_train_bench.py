"""The training benchmark runs, and its parts add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import compose
from tests.test_eagle import batch_of, head_of, target_of
from tests.training import chats, overrides, run_config
from train.bench import measure
from train.config import EagleRun, TrainConfig
from train.measure.products import products


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "eagle1"])
def test_bench_parts_add_up(tmp_path: Path, kind: str) -> None:
    data, more = chats(tmp_path / "d.jsonl"), ("steps=3", "micro_batch=2", "head.loss.soft=1")
    if kind == "medusa":
        cfg: TrainConfig = run_config(data, tmp_path / "run", *more)
    else:
        given = [
            o
            for o in overrides(data, tmp_path / "run", f"head={kind}", *more)
            if "head.heads" not in o
        ]
        cfg = compose("eagle", EagleRun, given)
    report = measure(cfg)
    assert report["products_flops_per_second"] > 0
    assert all(0 < share < 2 for share in report["share_of_step"].values())
    assert 0 < report["ratio_low"] <= report["ratio"] <= report["ratio_high"]
    assert report["bottleneck"] in report["share_of_step"] and report["rounds"] == 3
    assert set(report["share_of_step"]) < set(report["seconds"])


def test_products_are_those_that_the_counter_sees() -> None:
    """Against torch's own count of a whole pass: the list leaves nothing big out and makes
    nothing up.
    """
    from torch.utils.flop_counter import FlopCounterMode

    target = target_of()
    for kind in ("eagle3", "eagle1"):
        head, batch = head_of(target, kind=kind, steps=3), batch_of([40, 40, 33])
        with FlopCounterMode(display=False) as counter:
            target.features(batch.ids, batch.mask, head.taps)
        rest = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            head(batch, target).sum.backward()
        seen, needed = counter.get_total_flops() - rest, products(head, target, batch)[1]
        assert 0.6 < needed / seen < 1.1, (kind, needed, seen)
