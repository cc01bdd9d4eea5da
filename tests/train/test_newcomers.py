"""What someone meets who brings data of their own, in other forms or too few: told in a line,
or managed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from outrider.conf.errors import UserError
from outrider.decode.models.facts import eos_ids
from outrider.decode.models.tiny import byte_tokenizer
from outrider.heads.checkpoint import read_card
from outrider.train.data.batches import JoinedRows
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from outrider.train.setup import fitting
from tests.helpers.chats import CHATML_WITH_SPANS
from tests.helpers.training import chats, run, tiny_target


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


def read(tmp_path: Path, *rows: dict[str, Any], tokenizer: Any = None, **keys: Any) -> JoinedRows:
    """The tokens of rows, of which any may be left out."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(path=str(path), held_out=0.0, cache=False, max_bad_fraction=1.0, **keys)
    return load_rows(cfg, tokenizer or byte_tokenizer(), (2,), 260, 512)


def said(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"messages": turns, **more}


def taught(rows: JoinedRows, row: int = 0) -> list[str]:
    """The supervised text of a row, in pieces."""
    part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
    ids, on = rows.ids[part], rows.loss[part]
    text = byte_tokenizer().decode([int(t) if o else 0 for t, o in zip(ids, on, strict=True)])
    return [piece for piece in text.split(byte_tokenizer().decode([0])) if piece]


GOOD = said("q", "a")


def test_a_system_text_beside_the_turns_stands_first(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "one plus one?"}, {"from": "gpt", "value": "deux"}]
    beside = {"system": "Answer in French.", "conversations": turns}
    inside = said("one plus one?", "deux")
    inside["messages"].insert(0, {"role": "system", "content": "Answer in French."})
    for row in (beside, {**inside, "system_prompt": "Answer in French."}):
        one, other = read(tmp_path, row), read(tmp_path, inside)
        assert one.ids.equal(other.ids) and one.loss.equal(other.loss)
    rows = read(tmp_path, {**inside, "system": "Another."}, GOOD, {**GOOD, "system": ""})
    assert "another one in them" in rows.bad[0] and rows.lines.tolist() == [2, 3]


def test_turns_and_rows_of_weight_0_are_not_learned(tmp_path: Path) -> None:
    four = said("q", "first", "r", "second")
    for key, value in (("weight", 0), ("loss", False), ("train", False), ("trainable", 0)):
        four["messages"][1] = {"role": "assistant", "content": "first", key: value}
        rows = read(tmp_path, four)
        assert taught(rows) == ["second<|im_end|>"], key
        assert (
            "1 of 1 assistant turns" in rows.supervision() and "1 not learned" in rows.supervision()
        )
        assert read(tmp_path, four, turns="rows").lines.tolist() == [1]
        whole = read(tmp_path, {**GOOD, key: value}, GOOD)
        assert whole.lines.tolist() == [2] and not whole.bad
    last = said("q", "first", "r", "second")
    last["messages"][3]["weight"] = 0.0
    assert taught(read(tmp_path, last)) == ["first<|im_end|>"]
    assert read(tmp_path, last, GOOD, last_turn_only=True).lines.tolist() == [2]
    assert "0.5" in read(tmp_path, {**GOOD, "weight": 0.5}, GOOD).bad[0]


def test_what_a_row_says_and_nobody_reads_is_left_out_by_name(tmp_path: Path) -> None:
    called = said("q", "a")
    called["messages"][1] = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    odd = [{**GOOD, key: ["x"]} for key in ("documents", "images", "functions", "audio")]
    odd += [{**GOOD, "chat_template_kwargs": {"a": 1}}, called]
    rows = read(tmp_path, *odd, {**GOOD, "images": [], "id": 7, "source": "x"})
    names = ("documents", "images", "functions", "audio", "chat_template_kwargs", "function_call")
    assert all(f"holds {name}" in bad for name, bad in zip(names, rows.bad, strict=True))
    assert rows.lines.tolist() == [7] and "1 x holds images" in rows.reasons(6)


def test_rows_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    ids, mask = [0, 5, 6, 7, 8, 2], [0, 0, 1, 1, 0, 1]
    rows = read(
        tmp_path,
        {"input_ids": ids, "loss_mask": mask},
        {"input_ids": ids},
        {"input_ids": ids, "loss_mask": [1]},
        {"input_ids": ["a"], "loss_mask": [1]},
        {"input_ids": ids, "loss_mask": [1, 0, 0, 0, 0, 0]},
    )
    assert rows.lines.tolist() == [1, 2] and rows.ids[:6].tolist() == ids
    assert rows.loss[:6].tolist() == [bool(on) for on in mask]
    assert rows.loss[6:].tolist() == [False, *[True] * 5] and rows.prompt(0) == ids[:2]
    assert [bad.partition(": ")[2].split()[0] for bad in rows.bad] == [
        "loss_mask",
        "input_ids",
        "no",
    ]


def test_plain_text_begins_as_the_tokenizer_has_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        "<|im_start|> $A", None, [("<|im_start|>", 1)]
    )
    rows = read(tmp_path, {"text": "abc"}, tokenizer=tokenizer)
    assert rows.ids[0] == 1 and rows.loss.tolist() == [False, True, True, True]


def test_tags_that_leave_the_end_of_a_turn_out_do_not_lose_it(tmp_path: Path) -> None:
    template = CHATML_WITH_SPANS
    end = "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    bare = template.replace(end, end.replace(" + '<|im_end|>'", "") + "<|im_end|>")
    assert bare != template
    one, other = (
        read(tmp_path, GOOD, tokenizer=byte_tokenizer(template=text)) for text in (template, bare)
    )
    assert one.ids.equal(other.ids) and one.loss.equal(other.loss)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json", "rows.jsonl.zst"])
def test_packed_lines_and_one_array_are_read_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    plain = chats(tmp_path / "plain.jsonl", 9)
    lines, path = plain.read_bytes(), tmp_path / name
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(lines))
    elif name.endswith("zst"):
        path.write_bytes(pytest.importorskip("zstandard").compress(lines))
    else:
        path.write_text(json.dumps([json.loads(line) for line in lines.splitlines()]))
    found, want = (
        load_rows(DataConfig(path=str(p), cache=False), byte_tokenizer(), (2,), 260, 512)
        for p in (path, plain)
    )
    assert found.ids.equal(want.ids) and found.loss.equal(want.loss)


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
    rows = [{**GOOD, "context": "x"}, {**GOOD, "context": "y", "id": 3, "weight": 1}, GOOD, GOOD]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(path, tmp_path / "run", "steps=1", "data.held_out=0")
    assert "keys not read: context in 2 rows, id in 1 rows" in capsys.readouterr().err
