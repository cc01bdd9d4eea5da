"""The pair of trainers: every head that it names has all keys that its training wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.conf.schema import compose
from outrider.scripts.lab.train_pair import HEADS, TrainPair, TrainPairConfig
from outrider.train.config import ENTRIES


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_asked_for_with_the_keys_that_it_wants(name: str, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("")
    out, report = str(tmp_path / "out"), str(tmp_path / "report.json")
    pair = TrainPair(TrainPairConfig(before=".", chats=str(chats), out=out, report=report))
    _, file, *words = pair.command(name, pair.entries[0], tmp_path)
    stem, schema = ENTRIES[HEADS[name][0]]
    assert Path(file).stem == stem
    compose(stem, schema, words)
