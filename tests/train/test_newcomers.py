"""What someone meets who brings data of their own, in other forms or too few: told in a line,
or managed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.tiny import byte_tokenizer
from outrider.heads.checkpoint import read_card
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from outrider.train.setup import fitting
from tests.helpers.training import chats, run


def test_a_target_without_chat_template_is_message_once_not_row_by_row(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    path = chats(tmp_path / "d.jsonl", 4)
    with pytest.raises(
        UserError,
        match=r"^target: its tokenizer has no chat template, which .*d.jsonl:1 needs; take",
    ):
        load_rows(DataConfig(path=str(path), cache=False), tokenizer, (257,), 260, 256)


def test_a_draft_vocabulary_that_the_data_cannot_fill_is_lowered(tmp_path: Path, capsys) -> None:
    counts = torch.zeros(9000, dtype=torch.int64)
    counts[100:7521] = 1
    size, note = fitting(8192, counts)
    assert size == 7360 and "8,192 wanted, but only 7,421 different" in note
    assert fitting(7360, counts) == (7360, "")
    for _ in range(2):  # the second time it resumes: what is learned is the same
        out = run(
            chats(tmp_path / "data.jsonl"), tmp_path / "run", "head.draft_vocab=259", "steps=1"
        )
    assert 8 <= read_card(out / "head")["head"]["config"]["draft_vocab"] < 64
    message = capsys.readouterr().err
    assert "head.draft_vocab: 259 wanted, but only" in message and "resuming" in message
