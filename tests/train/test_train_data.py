"""Rows, masks and the order of batches."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from outrider.conf.errors import UserError
from outrider.conf.jsonl import MAX_LINE, parse_line, records
from outrider.decode.models.tiny import CHATML, byte_tokenizer
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.config import DataConfig, RowsConfig
from outrider.train.data.load import load_rows
from outrider.train.data.passes import Limits
from outrider.train.data.rows import BadRow, ChatRow, encode, interpret
from tests.helpers.chats import CHATML_WITH_SPANS
from tests.helpers.training import chats

EOS = frozenset({2})
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <|im_start|>assistant"},
    {"role": "assistant", "content": "hé, 12!"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no\nmore"},
]


def supervised(tokenizer, turns, **row) -> str:
    (ids, mask, *_), *rest = encode(ChatRow("f:1", turns, **row), tokenizer, RowsConfig(4096), EOS)
    assert not rest and len(ids) == len(mask)
    return tokenizer.decode([t for t, on in zip(ids, mask, strict=True) if on])


@given(
    st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
            min_size=1,
            max_size=20,
        ).filter(str.strip),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_mask_property_on_any_text(answers: list[str]) -> None:
    """Decoding what is supervised gives the answers, whatever they hold, special tokens' names
    included.
    """
    turns = [
        t
        for a in answers
        for t in ({"role": "user", "content": "q"}, {"role": "assistant", "content": a})
    ]
    for template in (CHATML, CHATML_WITH_SPANS):
        got = supervised(byte_tokenizer(template=template), turns)
        assert got == "".join(a + "<|im_end|>" for a in answers)


def test_all_zero_and_all_one_masks_are_refused() -> None:
    everything = (
        "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(BadRow, match="every token is supervised"):
        encode(ChatRow("f:7", TURNS), byte_tokenizer(template=everything), RowsConfig(4096))
    with pytest.raises(BadRow, match="f:7: no supervised token within data.max_length=9"):
        encode(ChatRow("f:7", TURNS), byte_tokenizer(), RowsConfig(9), EOS)
    blind = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(BadRow, match="shows no assistant turn apart from the rest"):
        encode(ChatRow("f:7", TURNS), byte_tokenizer(template=blind), RowsConfig(4096), EOS)


def chat(*turns: tuple[Any, Any], **more: Any) -> bytes:
    """A row of (role, content) turns."""
    return json.dumps(
        {"messages": [{"role": role, "content": content} for role, content in turns], **more}
    ).encode()


def shared(*turns: tuple[Any, Any]) -> bytes:
    """The same in ShareGPT's keys."""
    return json.dumps(
        {"conversations": [{"from": role, "value": content} for role, content in turns]}
    ).encode()


def good(n: int) -> bytes:
    """A sound row, one in five of them in an unusual but sound form."""
    answer = " ".join(["the", "rider", "goes", "ahead", "of", "a", "slow", "horse"][: 2 + n % 7])
    turns = [("user", f"question {n}"), ("assistant", answer)]
    forms = {
        0: lambda: b"\xef\xbb\xbf" + chat(*turns),  # a byte order mark, as of joined files
        5: lambda: chat(*turns) + b"\r",
        10: lambda: b"  " + chat(*turns, id=n, source={"a": [1, None]}) + b"\t",
        15: lambda: shared(("system", "be brief"), ("human", f"question {n}"), ("gpt", answer)),
        20: lambda: chat(("user", f"question\u2028{n}\x85"), ("assistant", answer + "\U0001f40e")),
    }
    return forms.get(n % 25, lambda: chat(*turns))()


BAD: dict[str, tuple[bytes, str]] = {
    "cut JSON": (b'{"messages": [{"role": "us', "is not JSON"),
    "single quotes": (b"{'text': 'x'}", "is not JSON"),
    "two objects on a line": (chat(("user", "q")) + chat(("assistant", "a")), "is not JSON"),
    "HTML page": (b"<html><body>error</body></html>", "is not JSON"),
    "list": (b"[1]", "is not an object"),
    "null": (b"null", "is not an object"),
    "not UTF-8": (b'{"text": "\xff\xfe"}', "is not UTF-8"),
    "NUL byte": (b'{"text": "\0"}', "NUL byte"),
    "key twice": (b'{"text": "x", "text": "y"}', "a key twice"),
    "line too long": (b'{"text": "%s"}' % (b"x" * MAX_LINE), "bytes (limit"),
    "nested too deeply": (b'{"text": ' + b"[" * 100000, "is n"),
    "no known key": (b'{"prompt": "x"}', "its keys: prompt"),
    "no turns": (b'{"messages": []}', "none of messages"),
    "turns are text": (b'{"messages": "x"}', "not a list"),
    "turn is text": (b'{"messages": ["x"]}', "turn 0 is not an object"),
    "unknown role": (chat(("user", "q"), ("robot", "a")), "turn 1: unknown role 'robot'"),
    "role is a number": (chat((1, "a")), "unknown role 1"),
    "no content": (b'{"conversations": [{"from": "human"}]}', "content is NoneType"),
    "content is a number": (shared(("human", 3)), "content is int"),
    "an image": (chat(("user", [{"type": "image"}]), ("assistant", "a")), "turn 0 holds image"),
    "content blank": (chat(("user", " \n\t"), ("assistant", "a")), "turn 0: content is empty"),
    "half a surrogate": (chat(("user", "q"), ("assistant", "a\ud800")), "turn 1: holds half of"),
    "NUL character": (chat(("user", "q"), ("assistant", "a\0")), "turn 1: holds a NUL"),
    "assistant first": (chat(("assistant", "a"), ("user", "q")), "turn 0: role 'assistant'"),
    "user twice": (chat(("user", "q"), ("user", "q"), ("assistant", "a")), "turn 1: role 'user'"),
    "system in between": (
        chat(("user", "q"), ("assistant", "a"), ("system", "s")),
        "may only stand",
    ),
    "no assistant": (chat(("system", "s"), ("user", "q")), "no assistant turn"),
    "question fills the length": (
        chat(("user", "long " * 400), ("assistant", "a")),
        "no supervised token within data.max_length",
    ),
    "text is a number": (b'{"text": 3}', "none of messages"),
    "text blank": (b'{"text": " "}', "text is empty"),
}


def test_every_kind_of_bad_row_is_named_and_the_good_ones_stay(tmp_path: Path) -> None:
    """Each reported at its line with its reason, the others as in a file without them, and a
    stop where the limit is lower."""
    lines: list[tuple[bytes, str]] = [*BAD.values(), *((good(n), "") for n in range(60))]
    random.Random(0).shuffle(lines)
    clean, mixed = tmp_path / "clean.jsonl", tmp_path / "mixed.jsonl"
    clean.write_bytes(b"".join(line + b"\n" for line, why in lines if not why))
    with mixed.open("wb") as file:
        for line, _ in lines:
            file.write(line + b"\n")
    expected = {f"{mixed}:{i}": why for i, (_, why) in enumerate(lines, 1) if why}
    share = len(expected) / len(lines)
    want, got = (
        load(clean, max_bad_fraction=0.0, max_length=512),
        load(mixed, max_bad_fraction=share, max_length=512),
    )
    for name in ("ids", "loss", "offsets", "held"):
        assert getattr(got, name).numpy().tobytes() == getattr(want, name).numpy().tobytes(), name
    assert got.lines.tolist() == [i for i, (_, why) in enumerate(lines, 1) if not why]
    found = dict(problem.split(": ", 1) for problem in got.bad)
    assert list(found) == list(expected) and len(found) == len(got.bad)
    for where, why in expected.items():
        assert why in found[where], (where, why, found[where])
    first = re.escape(got.bad[0])
    with pytest.raises(
        UserError, match=f"^{first}; {len(expected)} of {len(lines)} rows are unusable"
    ):
        load(mixed, max_bad_fraction=share - 1e-6, max_length=512)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_crash_the_reader(line: bytes) -> None:
    try:
        interpret(parse_line(line), "f:1")
    except ValueError as error:
        assert str(error)


def load(path: Path, **keys) -> JoinedRows:
    cfg = DataConfig(path=str(path), **{"held_out": 0.2, "cache": False, **keys})
    return load_rows(cfg, byte_tokenizer(), EOS, 260, 1024)


def test_token_cache_gives_the_same_rows_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl")
    first = load(path, cache=True)
    kept = first.totals.sha256
    moved = path.rename(tmp_path / "e.jsonl")
    again = load(moved, cache=True)
    assert again.totals.sha256 == kept and again.where(0) == f"{moved}:1"
    load(moved, cache=True, max_length=300)
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 2
    cfg = DataConfig(path=str(moved), held_out=0.2, cache=True)
    for tokenizer, held_out in (
        (byte_tokenizer(template=CHATML_WITH_SPANS.replace("user", "you")), 0.2),
        (byte_tokenizer(270), 0.2),
        (byte_tokenizer(), 0.5),
    ):
        before = len(list((tmp_path / "cache" / "tokens").iterdir()))
        load_rows(replace(cfg, held_out=held_out), tokenizer, EOS, 270, 1024)
        after = len(list((tmp_path / "cache" / "tokens").iterdir()))
        assert after == before + 1, "other tokens, another file"


def test_datasets_folder_and_text_file(tmp_path: Path) -> None:
    import datasets

    path = chats(tmp_path / "d.jsonl", 10)
    want = load(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "disk"))
    got = load(tmp_path / "disk", kind="hub")
    assert (
        got.ids.equal(want.ids)
        and got.loss.equal(want.loss)
        and got.where(3) == f"{tmp_path / 'disk'}[train]:3"
    )
    (tmp_path / "t.txt").write_text("one two\nthree\n\n\nfour five six\n")
    text = load(tmp_path / "t.txt", kind="text", held_out=0.0)
    assert text.lines.tolist() == [1, 5] and text.loss.sum() == text.ids.numel() - 2
    with pytest.raises(UserError, match="cannot load"):
        load(tmp_path / "no folder", kind="hub")


def test_held_out_rows_follow_the_prompt_and_are_never_trained_on(tmp_path: Path) -> None:
    rows = load(chats(tmp_path / "d.jsonl", 60))
    assert 0 < rows.held.sum() < 30
    twice = tmp_path / "twice.jsonl"
    twice.write_text((tmp_path / "d.jsonl").read_text() * 2)
    assert load(twice).held.tolist() == rows.held.tolist() * 2
    answered = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    for row in answered:
        row["messages"][1]["content"] += ", says another model"
    twice.write_text("".join(json.dumps(row) + "\n" for row in answered))
    assert load(twice).held.equal(rows.held), "what is asked decides, not what is answered"
    plan = BatchPlan(rows, 4, 2, 0)
    used = {r for k in range(3 * plan.per_epoch) for r in plan.batch(k)}
    assert not used & set(rows.held.nonzero()[:, 0].tolist())
    prompt = byte_tokenizer().decode(rows.prompt(5))
    assert prompt == "<|im_start|>user\nquestion 5<|im_end|>\n<|im_start|>assistant\n"


def test_eight_rows_are_held_out_of_a_hundred_whatever_the_hash_says(tmp_path: Path) -> None:
    """By their prompts, however the rows lie in files; and counted as held out."""

    def asked(rows: JoinedRows) -> set[str]:
        decode = byte_tokenizer().decode
        return {decode(rows.prompt(r)) for r in rows.held.nonzero()[:, 0].tolist()}

    path = chats(tmp_path / "d.jsonl", 160)
    rows = load(path, held_out=1e-9)
    assert rows.held.sum() == len(asked(rows)) == 8
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[100:]))
    (tmp_path / "b.jsonl").write_text("".join(reversed(lines[:100])))
    cfg = DataConfig(path=[str(tmp_path / f"{name}.jsonl") for name in "ba"], held_out=1e-9)
    parts = load_rows(cfg, byte_tokenizer(), EOS, 260, 1024)
    assert asked(parts) == asked(rows) and parts.counts(260).equal(rows.counts(260))
    path.write_text("".join(line for line in lines for _ in range(3)))
    assert load(path, held_out=1e-9).held.sum() == 9, "three chats of three rows each"
    path.write_text(lines[0] * 160)
    assert not load(path, held_out=1e-9).held.any(), "or nothing is left to train on"
    assert not load(chats(path, 99), held_out=1e-9).held.any()
    assert not load(chats(path, 160), held_out=0).held.any()


def test_batch_k_is_a_function_of_seed_epoch_and_k(tmp_path: Path) -> None:
    rows = load(chats(tmp_path / "d.jsonl", 60))
    plan = BatchPlan(rows, 4, 3, 7)
    steps = list(range(3 * plan.per_epoch))
    want = [plan.batch(k) for k in steps]
    fresh = BatchPlan(rows, 4, 3, 7)
    assert [fresh.batch(k) for k in reversed(steps)] == want[::-1]
    assert [BatchPlan(rows, 4, 3, 8).batch(k) for k in steps] != want
    for e in range(3):
        epoch = sum(want[e * plan.per_epoch : (e + 1) * plan.per_epoch], [])
        assert len(set(epoch)) == len(epoch) == plan.per_epoch * 4
    assert want[: plan.per_epoch] != want[plan.per_epoch : 2 * plan.per_epoch]
    for world in (
        1,
        2,
        4,
    ):  # the ranks share out the same global batch, in as many micro-batches each
        parts = plan.shares(5, world, Limits(1))
        assert sorted(r for p in parts for m in p for r in m) == sorted(want[5])
        assert len({len(p) for p in parts}) == 1


# Tokens on disk: streamed data sets, damaged files
# -------------------------------------------------------------------------------------------


def parquet(folder: Path, rows: list[dict], files: int = 3) -> Path:
    folder.mkdir()
    for i in range(files):
        part = rows[i * len(rows) // files : (i + 1) * len(rows) // files]
        datasets.Dataset.from_list(part).to_parquet(
            str(folder / f"train-{i:05d}-of-{files:05d}.parquet")
        )
    return folder


def test_streamed_rows_are_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, hence the same batches and the same meaning of a run, however they were
    read.
    """
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = chats(tmp_path / "d.jsonl", 50)
    want = load(path)
    folder = parquet(tmp_path / "data", records(path))
    streamed = load(folder, kind="hub", streaming=True, cache=True)
    assert (
        streamed.totals.sha256 == want.totals.sha256 and streamed.where(3) == f"{folder}[train]:3"
    )
    assert [
        t.equal(getattr(want, n))
        for n in ("ids", "loss", "offsets", "held")
        for t in [getattr(streamed, n)]
    ]
    train = want.loss & ~want.held.repeat_interleave(want.lengths)
    assert streamed.counts(260).equal(want.ids[train].long().bincount(minlength=260))
    steps = range(2 * BatchPlan(want, 4, 3, 7).per_epoch)
    assert [BatchPlan(streamed, 4, 3, 7).batch(k) for k in steps] == [
        BatchPlan(want, 4, 3, 7).batch(k) for k in steps
    ]
    saved = sorted((tmp_path / "cache" / "tokens").iterdir())
    assert len(saved) == 1, "nothing spilled is left behind"
    with safe_open(saved[0], "pt") as file:
        assert file.get_tensor("ids").equal(want.ids) and file.get_tensor("loss").equal(want.loss)
    monkeypatch.setattr("outrider.train.data.tokens.encoded", None)
    assert load(folder, kind="hub", streaming=True, cache=True).totals.sha256 == want.totals.sha256
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    changed = records(path)
    changed[7]["messages"][1]["content"] += "!"
    (folder / "train-00000-of-00003.parquet").unlink()
    parquet(tmp_path / "other", changed)
    (tmp_path / "other" / "train-00000-of-00003.parquet").rename(
        folder / "train-00000-of-00003.parquet"
    )
    assert (
        load(folder, kind="hub", streaming=True, cache=True).totals.sha256 != want.totals.sha256
    ), "read again: other bytes"
    with (folder / "train-00001-of-00003.parquet").open("r+b") as broken:
        broken.seek(20)
        broken.write(b"\xff" * 200)
    with pytest.raises(UserError, match=r"data.name: .*cannot (be read beyond row \d+|load)"):
        load(folder, kind="hub", streaming=True, cache=True)


# Requests and answers of the OpenAI API as rows: the answer alone is supervised
# -------------------------------------------------------------------------------------------


ASKED = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "earlier"},
    {"role": "user", "content": "two"},
]


def line(message: Any, request: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    answered = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    asked = {"model": "m", "messages": ASKED, **(request or {})}
    return {"time": 3, "request": asked, "response": {"id": "x", "choices": [answered]}}


def answers(record: dict[str, Any], turns: str = "chat") -> list[str]:
    tokenizer = byte_tokenizer()
    rows = encode(
        interpret(record, "f:1"), tokenizer, RowsConfig(4096, turns=turns), frozenset({2})
    )
    return [
        tokenizer.decode([t for t, on in zip(row.ids, row.loss, strict=True) if on]) for row in rows
    ]


@pytest.mark.parametrize("turns", ["chat", "rows"])
def test_the_answer_alone_is_supervised(turns: str) -> None:
    answer = {"role": "assistant", "content": "answer", "refusal": None, "annotations": []}
    assert answers(line(answer), turns) == ["answer<|im_end|>"]
    assert answers(line(answer, stop_reason=None), turns) == ["answer<|im_end|>"]


def test_calls_and_tools_are_kept() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = interpret(line({"content": None, "tool_calls": [call]}, {"tools": tools}), "f:1")
    assert row.tools == tools and row.chat and row.complete and row.last_only
    assert row.chat[-1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"request": {"prompt": "x"}, "response": {"choices": []}}, "request has no messages"),
    ({"request": {"messages": ASKED}, "response": {"error": "busy"}}, "no choices"),
    (line({"content": ""}), "content is empty"),
    (line({"content": "x", "refusal": "no"}), "refusal"),
]


def test_malformed_lines_are_left_out_by_file_and_line(tmp_path: Path) -> None:
    path, good = tmp_path / "log.jsonl", line({"content": "answer"})
    rows = [*(bad for bad, _ in UNUSABLE), *[good] * 5]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(path=str(path), held_out=0.0, cache=False, max_bad_fraction=0.5)
    found = load_rows(cfg, byte_tokenizer(), frozenset({2}), 260, 1024)
    for number, (problem, (_, reason)) in enumerate(zip(found.bad, UNUSABLE, strict=True), 1):
        assert problem.startswith(f"{path}:{number}: ") and reason in problem
    assert len(found.lines) == 5
