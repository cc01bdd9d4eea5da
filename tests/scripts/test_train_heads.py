"""The script that trains one head of every recipe: its commands are real, and it goes on where
it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.schema import compose
from scripts import train_heads
from scripts.common.steps import Step
from scripts.train_heads import RECIPES, HeadsConfig
from tests.helpers.training import chats
from train.config import ENTRIES

TINY = [
    "target=tiny",
    "target.layers=2",
    "target.hidden=32",
    "target.vocab=260",
    "head.draft_vocab=0",
    "dtype=float32",
    "device=cpu",
    "data.cache=false",
    "batch_size=4",
]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_real_command(name: str) -> None:
    config, schema = ENTRIES[RECIPES[name][0]]
    cfg: Any = compose(config, schema, train_heads.keys(HeadsConfig(), name, Path("x"), 3))
    assert cfg.steps == 3 and cfg.out_dir == f"runs/heads/{name}"


def test_heads_are_given_alike_and_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, ran = chats(tmp_path / "data.jsonl"), []

    def trained(step: Step, job: str, folder: Path) -> None:
        ran.append(step.args)
        step.leaves.parent.mkdir(parents=True, exist_ok=True)
        step.leaves.write_text("{}")

    monkeypatch.setattr(train_heads, "run", trained)
    asked = [f"path={data}", f"out={tmp_path / 'heads'}", "heads=[medusa,dspark]", "flops=2e8"]
    command = [*asked, "more=[" + ",".join(f"'{k}'" for k in TINY) + "]"]
    for _ in range(2):
        with pytest.raises(SystemExit) as caught:
            train_heads.main(command)
        assert caught.value.code == 0
    assert [args[0] for args in ran] == ["train/medusa.py", "train/block.py"]
    assert capsys.readouterr().out.count("done already") == 2
    found = json.loads((tmp_path / "heads/heads.json").read_text())
    for name, args in zip(("medusa", "dspark"), ran, strict=True):
        row = found["heads"][name]
        assert f"steps={row['steps']}" in args and row["steps"] > 1
        assert abs(row["flops"] - 2e8) <= row["flops_per_step"] / 2
    assert len(found["data_sha256"]) == 64


def test_mistakes_are_named() -> None:
    for keys, said in (
        (["heads=[meduza]"], "heads: 'meduza' is none of"),
        (["steps=0"], "steps: 0"),
        (["flops=-1"], "flops: -1 is below 0"),
        (["out="], "out: is empty"),
    ):
        with pytest.raises(UserError, match=said):
            compose("train_heads", HeadsConfig, keys)
