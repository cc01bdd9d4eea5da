"""The training benchmark runs for every kind of head, and its parts add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.schema import compose
from outrider.heads.parallel.medusa import MedusaConfig, MedusaHead
from outrider.train import cache_features
from outrider.train.bench import main, measure
from outrider.train.measure.speed import draft_flops
from outrider.train.validate import ValidateConfig
from tests.heads.test_eagle import batch_of, target_of
from tests.helpers.training import chats, overrides


def keys(tmp_path: Path, kind: str, *more: str) -> list[str]:
    """A command line of the bench."""
    data, own = chats(tmp_path / "d.jsonl"), ("micro_batch=2", "head.loss.soft=1", "optim.lr=null")
    every = overrides(data, tmp_path / "run", f"head={kind}", "steps=3", *own, *more)
    return [key for key in every if kind == "medusa" or not key.startswith("head.heads")]


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "eagle1", "dflash", "small_lm"])
def test_bench_parts_add_up(tmp_path: Path, kind: str) -> None:
    own = ("target.layers=2", "head.from_target_layers=1")
    more = own if kind == "small_lm" else ()
    report = measure(compose("validate", ValidateConfig, keys(tmp_path, kind, *more)))
    shares = report["share_of_step"]
    assert 0.9 < sum(shares.values()) < 1.1, "medians of three rounds"
    assert 0 < report["ratio_low"] <= report["ratio"] <= report["ratio_high"]
    assert report["bottleneck"] in shares and report["rounds"] == 3
    assert report["matrix_product_flops_per_second"] > 0 and report["draft_flops_per_token"] > 0
    assert "stored" not in report


def test_stored_features_step_beside_online_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given = tmp_path / "features", keys(tmp_path, "eagle3")
    kept = [key for key in given if key.startswith(("target", "data.", "dtype", "device"))]
    with pytest.raises(SystemExit) as ended:
        cache_features.main([*kept, f"out={folder}", "heads=[eagle3]"])
    assert not ended.value.code
    with pytest.raises(SystemExit) as ended:
        main([*given, f"data.features={folder}"])
    assert not ended.value.code
    report = json.loads((tmp_path / "run" / "bench.json").read_text())["stored"]
    assert report["largest_relative_loss_difference"] < 1e-6
    assert report["bytes_per_token"] > 0 and 0 < report["ratio_low"] <= report["ratio_high"]
    assert "stored features: " in capsys.readouterr().out


def test_a_heads_arithmetic_is_counted() -> None:
    """Medusa's by hand: blocks of D x D without a gradient of their input, and draft logits with
    both gradients, for every head and supervised token."""
    target, batch = target_of(), batch_of([40, 40, 33])
    head: Any = MedusaHead.for_target(
        target, MedusaConfig(heads=2, draft_vocab=0), torch.ones(target.vocab_size)
    )
    width, vocab = target.hidden_size, target.vocab_size
    per_row = 2 * width * width * 2 + 2 * width * vocab * 3
    tokens = int(batch.mask.sum())
    needed = 2 * int(batch.loss_mask.sum()) * per_row
    assert draft_flops(target, head, batch) * tokens == pytest.approx(needed, rel=0.1)
    assert all(weight.grad is None for weight in head.parameters())
