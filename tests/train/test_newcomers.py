"""What someone meets who brings data of their own, in other forms or too few: told in a line,
or managed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.facts import eos_ids
from outrider.decode.models.tiny import byte_tokenizer
from outrider.heads.checkpoint import read_card
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from outrider.train.setup import fitting
from tests.helpers.training import chats, run, tiny_target
from tests.train.test_odd_rows import ODD, chat


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


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json", "rows.jsonl.zst"])
def test_packed_lines_and_one_array_are_read_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    plain, path = tmp_path / "plain.jsonl", tmp_path / name
    plain.write_text("".join(json.dumps(odd.row) + "\n" for odd in ODD.values()))
    lines = plain.read_bytes()
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(lines))
    elif name.endswith("zst"):
        path.write_bytes(pytest.importorskip("zstandard").compress(lines))
    else:
        path.write_text(json.dumps([json.loads(line) for line in lines.splitlines()]))
    found, want = (
        load_rows(
            DataConfig(path=str(p), cache=False, max_bad_fraction=1.0),
            byte_tokenizer(),
            {2},
            260,
            512,
        )
        for p in (path, plain)
    )
    assert found.ids.equal(want.ids) and found.loss.equal(want.loss)
    assert [line.removeprefix(str(path)) for line in found.bad] == [
        line.removeprefix(str(plain)) for line in want.bad
    ]


def test_what_ends_a_turn_is_joined_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model's configs name <|endoftext|>, its template and tokenizer <|im_end|>."""
    tokenizer, model = byte_tokenizer(), tiny_target().model
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [0, 8]
    assert eos_ids(model, tokenizer) == (0, 2, 7, 8)
    tokenizer.eos_token, model.config.eos_token_id = "<|endoftext|>", None
    assert eos_ids(model, tokenizer) == (0, 2, 8), "the template writes <|im_end|>"
    tokenizer.chat_template = None
    assert eos_ids(model, tokenizer) == (0, 8)
    data = chats(tmp_path / "data.jsonl", 20)
    run(data, tmp_path / "run", "steps=1", "data.held_out=0")
    assert "ends of turns: '<|im_end|>' 20 supervised" in capsys.readouterr().err
    monkeypatch.setattr("outrider.decode.models.facts.eos_ids", lambda *_: (9,))
    run(data, tmp_path / "none", "steps=1", "data.held_out=0")
    assert "WARNING: no end of a turn is supervised" in capsys.readouterr().err


def test_keys_of_a_row_that_nobody_reads_are_counted_in_the_header(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    good = chat("q", "a")
    rows = [
        {**good, "context": "x", "line": 0},
        {**good, "context": "y", "id": 3, "weight": 1},
        good,
        good,
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(path, tmp_path / "run", "steps=1", "data.held_out=0")
    said = capsys.readouterr().err
    assert "keys not read: context in 2 rows, id in 1 rows" in said and "line in" not in said
