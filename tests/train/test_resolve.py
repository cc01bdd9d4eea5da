"""What completes the configuration of a run, once: nothing is left for anybody to change after."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.schema import compose
from outrider.heads.registry import head_class
from outrider.train.checkpoint import newest, read
from outrider.train.config import TrainConfig
from outrider.train.runs import entry_of
from outrider.train.setup import first_head, resolve
from tests.contract.cases import CASES
from tests.helpers.training import TINY, chats, run_config, tiny_target

COUNTS = torch.arange(260) + 1


def config(kind: str, *more: str) -> Any:
    tiny = [f"target.{key}={value}" for key, value in TINY.items()]
    given = ["target=tiny", *tiny, "data.path=x", "out_dir=y", "dtype=float32", *more]
    return compose(*entry_of(kind), given)


def test_a_head_has_the_keys_that_were_resolved() -> None:
    """What a target settles (the width of layers) is settled before there is a head."""
    for case in CASES.values():
        keys: Any = case.config
        kind, target = head_class(keys.kind), tiny_target(layers=2)
        cfg = replace(config("medusa", "steps=1"), head=keys)
        made = resolve(cfg, kind, target, COUNTS, 10)
        assert first_head(made, kind, target)[0].cfg == made.cfg.head
        again = resolve(made.cfg, kind, target, COUNTS, 10)
        assert again.cfg == made.cfg and not again.notes


def test_what_is_open_is_settled_and_what_was_given_stays() -> None:
    kind, target = head_class("eagle3"), tiny_target(layers=2)
    cfg: TrainConfig = config("eagle3", "epochs=2.5", "head.draft_vocab=null")
    made = resolve(cfg, kind, target, COUNTS, 7).cfg
    assert (made.steps, made.optim.lr, made.head.draft_vocab) == (18, 1e-3, 256)
    assert cfg.steps == 0 and cfg.optim.lr is None and cfg.head.draft_vocab is None
    settled = ("steps", "optim", "head")
    rest = [field.name for field in fields(cfg) if field.name not in settled]
    assert all(getattr(made, name) == getattr(cfg, name) for name in rest)
    given = replace(cfg, steps=3, optim=replace(cfg.optim, lr=0.5))
    made = resolve(given, kind, target, COUNTS, 7, {"optim.lr": 0.1}).cfg
    assert (made.steps, made.optim.lr) == (3, 0.5)
    assert resolve(cfg, kind, target, COUNTS, 7, {"optim.lr": 0.1}).cfg.optim.lr == 0.1
    with pytest.raises(FrozenInstanceError):
        made.steps = 4  # type: ignore[misc]


def test_the_checkpoint_holds_what_was_resolved(tmp_path: Path) -> None:
    from outrider.train.loop import fit

    cfg = run_config(chats(tmp_path / "data.jsonl"), tmp_path / "run", "steps=0", "epochs=0.2")
    fit(cfg, head_class("medusa"))
    checkpoint, _ = newest(tmp_path / "run")
    assert checkpoint is not None
    state = read(checkpoint)
    assert state.meaning["steps"] == state.step > 0 and state.meaning["optim.lr"] == 1e-3
    assert cfg.steps == 0 and cfg.optim.lr is None
