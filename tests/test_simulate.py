"""The formula of the simulation against cases worked out by hand, and the command on a tiny
run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conf.schema import compose
from tests.training import TINY, chats
from train.simulate import SimulateConfig, exchange_seconds, imbalance, main, step_seconds


def config(data: Path, *more: str) -> SimulateConfig:
    return compose("simulate", SimulateConfig, command(data, *more))


def command(data: Path, *more: str) -> list[str]:
    return [
        "target=tiny",
        *(f"target.{k}={v}" for k, v in TINY.items()),
        f"data.path={data}",
        "data.cache=false",
        "dtype=float32",
        "device=cpu",
        "head.draft_vocab=0",
        *more,
    ]


def test_parts_by_hand(tmp_path: Path) -> None:
    cfg = config(
        tmp_path / "none", "latency=0", "node_bandwidth=8", "net_bandwidth=2", "per_node=4"
    )
    assert exchange_seconds(1, 16, cfg) == 0
    assert exchange_seconds(2, 16, cfg) == pytest.approx(2 * 1 / 2 * 16 / 8)
    assert exchange_seconds(4, 16, cfg) == pytest.approx(2 * 3 / 4 * 16 / 8)
    assert exchange_seconds(8, 16, cfg) == pytest.approx(
        2 * 3 / 4 * 16 / 8 + 2 * 1 / 2 * (16 / 4) / 2
    )
    assert step_seconds(10, 1.1, 3, 2) == pytest.approx(12) and step_seconds(10, 1, 1, 2) == 10


def test_imbalance_is_what_the_batches_say(tmp_path: Path) -> None:
    from tests.training import tiny_target
    from train.texts.batches import load_rows

    cfg = config(chats(tmp_path / "data.jsonl"), "data.held_out=0")
    target = tiny_target()
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )
    assert imbalance(rows, 4, 1, cfg) == 1
    assert 1 <= imbalance(rows, 4, 8, cfg) < 1.6
    rows.offsets = torch.arange(49) * 30
    del rows.__dict__["lengths"]
    assert imbalance(rows, 4, 8, cfg) == 1


def test_the_command(tmp_path: Path, capsys) -> None:
    data, ranks = chats(tmp_path / "data.jsonl"), tmp_path / "ranks.json"
    ranks.write_text(
        json.dumps(
            {
                "step_seconds": {"alone": 1.0},
                "all_reduce_seconds": 0.1,
                "rows_per_process": 4,
                "ratio": 0.9,
            }
        )
    )
    with pytest.raises(SystemExit) as caught:
        main(command(data, f"ranks={ranks}", f"out_dir={tmp_path}", "gpus=[1,8,16]", "overlap=0"))
    assert not caught.value.code
    report = json.loads((tmp_path / "scaling.json").read_text())
    assert report["simulated"] is True and [line["gpus"] for line in report["gpus"]] == [1, 8, 16]
    assert (
        report["gpus"][0]["efficiency"] == pytest.approx(1) and report["gpus"][2]["efficiency"] < 1
    )
    check = report["check"]
    assert check["predicted_ratio"] == pytest.approx(1 / (check["imbalance"] + 0.1))
    said = capsys.readouterr().out
    assert "simulated, not measured" in said and "0.900 measured" in said
