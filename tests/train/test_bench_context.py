"""The bench of sliding windows: texts of the asked length, paired answers, mistakes in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.errors import UserError
from conf.typed import faults
from heads import HEADS
from heads.checkpoint import save_head
from heads.eagle.config import EagleConfig
from tests.helpers.training import TINY, chats, tiny_target
from train import bench_context
from train.bench_context import WindowConfig, length, long_chats, measure, short_chats


def configured(tmp_path: Path, **keys: object) -> WindowConfig:
    """Windows put on a random head of a tiny target, which is left in tmp_path."""
    target = tiny_target(layers=4)
    head = HEADS["eagle3"].for_target(target, EagleConfig(draft_vocab=0))
    save_head(head, tmp_path / "head", target.identity, {"step": 1})
    cfg = WindowConfig(
        chats=str(chats(tmp_path / "chats.jsonl", 20)),
        train_chats=12,
        start=str(tmp_path / "head"),
        out_dir=str(tmp_path / "out"),
        windows=[8, 400],
        contexts=[100, 250],
        questions=2,
        answer=6,
        dtype="float32",
    )
    cfg.target.kind = "tiny"
    for key, value in {**TINY, "layers": 4, **keys}.items():
        setattr(cfg.target if hasattr(cfg.target, key) else cfg, key, value)
    return cfg


def test_windows_are_compared_on_the_same_answers(tmp_path: Path) -> None:
    """One that covers every text changes nothing; each question is told as it is known."""
    *_, report = found = list(measure(configured(tmp_path)))
    assert [r["questions"] for r in found] == [1, 2] and json.dumps(report)
    for context, by in report["contexts"].items():
        lengths, pairs = by["accepted_length"], by["paired_difference_to_all"]
        assert set(lengths) == {"all", "window 8", "window 400"}
        assert lengths["window 400"] == lengths["all"] and pairs["window 400"]["mean"] == 0
        assert all(1 <= v <= 6 for v in lengths["all"]["each"])
        assert all(int(context) - 90 < n <= int(context) + 20 for n in by["tokens_before"])


def test_long_chats_keep_every_chat_and_their_length(tmp_path: Path) -> None:
    tokenizer, short = tiny_target().tokenizer, short_chats(chats(tmp_path / "c.jsonl", 9))
    long = list(long_chats(short, tokenizer, 200))
    assert all(length(tokenizer, chat) <= 200 for chat in long) and len(long) > 1
    assert sum(long, []) == sum(short, [])[: sum(map(len, long))]


def test_what_the_bench_cannot_do_is_named(tmp_path: Path) -> None:
    wrong = faults(WindowConfig(contexts=[], answer=0))
    wrong += WindowConfig(windows=[5]).validate()
    for key in ("windows", "contexts", "answer"):
        assert sum(line.startswith(f"{key}: ") for line in wrong) == 1, (key, wrong)
    with pytest.raises(UserError, match="train_chats: 20 leaves no chat"):
        next(measure(configured(tmp_path, train_chats=20)))
    with pytest.raises(UserError, match="chats: not set"):
        next(measure(WindowConfig()))
    with pytest.raises(UserError, match="start: not set"):
        next(measure(WindowConfig(chats="x")))
    with pytest.raises(UserError, match="start: no head in"):
        next(measure(configured(tmp_path, start=str(tmp_path / "nowhere"))))
    assert bench_context.interval([1.5, 1.5]) == (1.5, 1.5)
