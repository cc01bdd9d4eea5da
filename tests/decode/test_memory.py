"""Memory told before loading, and the targets that need another library."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from outrider.conf.errors import UserError
from outrider.decode.models import memory, quantize
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.memory import MemoryPlan, Need
from outrider.decode.models.tiny import byte_tokenizer, tiny_model

CONFIG = SimpleNamespace(
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=64,
    head_dim=None,
    vocab_size=100,
)


def test_the_sum_by_hand() -> None:
    made = {"embed": nn.Embedding(100, 64), "layer": nn.Linear(64, 64, bias=False)}
    count = memory.parameters(nn.ModuleDict({**made, "norm": nn.RMSNorm(64)}))
    assert count == (6400 + 4096 + 64, 4096)
    plan = MemoryPlan(rows=3, tokens=50, nodes=9, drafters=1000)
    need = memory.estimate(CONFIG, count, "bfloat16", plan)
    assert need.weights == 2 * 10560 and need.drafters == 1000
    assert (
        need.cache == 2 * 2 * 3 * (50 + 9 + 1) * 2 * 16 * 2
    )  # K and V, layers, rows, slots, K/V heads, head, bytes
    assert need.tree == 3 * 10 * 100 * (2 + 8)
    assert need.total >= need.weights + need.cache + need.tree + need.drafters
    small = memory.estimate(CONFIG, count, "bfloat16", plan, quantize.bits("bnb-nf4"))
    assert small.weights == (6464 * 16 + 4096 * 4.5) // 8
    assert memory.estimate(CONFIG, (0, 0), "float32", MemoryPlan()) == Need(0, 0, 0)


def test_what_does_not_fit_is_message_with_the_fix(monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 10 << 30)
    memory.check(Need(5 << 30, 1 << 30, 0), "cpu", "m", MemoryPlan(rows=4))
    with pytest.raises(
        UserError, match=r"m needs .*weights 11.8 GB.* cpu has 10.7 GB free; take a smaller dtype"
    ):
        memory.check(Need(11 << 30, 0, 0), "cpu", "m", MemoryPlan())
    with pytest.raises(UserError, match="fewer than 64 rows"):
        memory.check(Need(1 << 30, 20 << 30, 0), "cpu", "m", MemoryPlan(rows=64))
    monkeypatch.setattr(memory, "available", lambda device: None)
    memory.check(Need(1 << 50, 0, 0), "cpu", "m", MemoryPlan())


def test_loading_checks_first(tmp_path: Path, monkeypatch: Any) -> None:
    tiny_model("llama", vocab=320).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "available", lambda device: 1 << 20)
    cfg = TargetConfig(kind="local", path=str(tmp_path))
    with pytest.raises(UserError, match="memory: .* needs"):
        load_target(cfg, "float32", "cpu", MemoryPlan(64, 4096, 64))
