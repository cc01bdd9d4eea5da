"""Rows from a server whose model thinks before it answers, as Qwen3 does: with and without a
reasoning parser, whole, cut and calling tools. What training then supervises are the tokens
that the server drew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.tiny import byte_tokenizer
from outrider.scripts.data import run
from outrider.scripts.data.run import synthesize
from outrider.scripts.data.server import AnswerRefused, GivenUp, ServerAnswer, read_answer
from outrider.train.data.config import RowsConfig
from outrider.train.data.rows import BadRow, encode, interpret
from tests.scripts.test_from_server import config, one_context, serving

__all__ = ["one_context"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
# A think block in the last turn alone, whatever its form in the row.
QWEN = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set text = m.content or '' %}{% set why = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}"
    "{% set why = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].strip() %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + why.strip() + '\n</think>\n\n' }}{% endif %}{{ text }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def qwen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tokenizer of the served model."""
    made = byte_tokenizer(template=QWEN)
    monkeypatch.setattr(run, "load_tokenizer", lambda *_, **__: made)
    return made


def questions(folder: Path, count: int, more: dict[str, Any] | None = None) -> None:
    with (folder / "asked.jsonl").open("w") as file:
        for i in range(count):
            chat = [{"role": "user", "content": f"look {i}.{t}"} for t in range(1 + i % 2)]
            spoken = [m for q in chat for m in (q, {"role": "assistant", "content": "other"})]
            file.write(json.dumps({"messages": spoken, **(more or {})}) + "\n")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]


def supervised(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """What stands before the last answer, and what is supervised of it."""
    how = RowsConfig(1 << 20, last_turn_only=True)
    (found,) = encode(interpret(row, "a:1"), tokenizer, how, frozenset({2}))
    first = found.loss.index(True)
    said = [i for i, on in zip(found.ids, found.loss, strict=True) if on]
    return tokenizer.decode(found.ids[:first]), tokenizer.decode(said)


@pytest.mark.parametrize("form", ["inside", "reasoning"])
@pytest.mark.parametrize("limit", [30, 4096])
def test_answers_are_supervised_as_they_were_drawn(
    tmp_path: Path, qwen: Any, form: str, limit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cut ones are counted, and supervised no further than they went."""
    questions(tmp_path, 8)
    whole = limit > 30
    with serving(tmp_path, thinks=form) as url:
        synthesize(config(tmp_path, url, max_new_tokens=limit, max_cut=1.0))
    for row in rows(tmp_path):
        assert row["complete"] == whole
        before, said = supervised(row, qwen)
        assert before.endswith("<|im_start|>assistant\n") and "think" not in before
        assert said.startswith("<think>\nlet me see how ")
        if whole:
            assert ("reasoning_content" in row["messages"][-1]) == (form != "inside")
            assert said.count("<think>") == said.count("</think>\n\n") == 1
            assert said.endswith("<|im_end|>")
        else:  # of a byte a token, blanks at the end left out
            assert len(row["messages"]) == 2 and "</think>" not in said and 28 <= len(said) <= 30
    said = capfd.readouterr().err
    assert f"{'0 of 12' if whole else '8 of 8'} answers were cut" in said
    assert "would leave out" not in said and ("100.0% of the answers" in said or not whole)


def test_tool_calls_are_kept_with_the_tools_and_end_the_chat(
    tmp_path: Path, qwen: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    questions(tmp_path, 4, {"tools": TOOLS})
    with serving(tmp_path, thinks="reasoning_content") as url:
        synthesize(config(tmp_path, url))
        given = rows(tmp_path)
        questions(tmp_path, 4)
        cfg = config(tmp_path, url, extra_body={"tools": TOOLS})
        cfg = replace(cfg, out=str(tmp_path / "b.jsonl"))
        synthesize(cfg)
    assert (tmp_path / "b.jsonl").read_text() == (tmp_path / "a.jsonl").read_text()
    for row in given:
        question, answer = row["messages"]
        assert row["tools"] == TOOLS and row["complete"] and question["role"] == "user"
        assert answer["content"] is None and answer["reasoning_content"].startswith("let me see")
        (call,) = answer["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at": "it"}'}
        before, said = supervised(row, qwen)
        assert before.startswith("<tools>") and "think" not in before
        assert said.startswith("<think>\nlet me") and said.endswith("</tool_call><|im_end|>")
    assert "would leave out" not in capfd.readouterr().err


def test_rows_that_training_would_leave_out_are_message_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a template that knows no reasoning, behind a server that cuts it out."""
    monkeypatch.setattr(run, "load_tokenizer", lambda *_, **__: byte_tokenizer())
    questions(tmp_path, 4)
    with serving(tmp_path, thinks="reasoning") as url:
        synthesize(config(tmp_path, url, out=str(tmp_path / "b.jsonl"), tokens=True))
        assert "would leave out" not in capfd.readouterr().err
        synthesize(config(tmp_path, url))
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "training would leave out 4 of the rows that were looked at, one because the chat" in said
    )
    with pytest.raises(BadRow, match="does not show the reasoning_content"):
        supervised(rows(tmp_path)[0], byte_tokenizer())


def test_forms_of_answers() -> None:
    def read(reason: str | None, usage: Any = None, ids: Any = None, **message: Any) -> Any:
        choice = {"message": message, "finish_reason": reason, "token_ids": ids}
        return read_answer({"choices": [choice], "usage": usage})

    assert read("stop", content=" yes ") == ServerAnswer(" yes ", True, -1, None)
    assert not read(None, content="a").finished, "unknown is not finished"
    for count, wanted in ((5, 5), ("5", -1)):
        assert read("stop", {"completion_tokens": count}, content="a").tokens == wanted
    for ids, kept in (([1, 2], [1, 2]), ([1, 2.5], None)):
        assert read("stop", ids=ids, content="a").token_ids == kept
    for wrong in ({"reason": "abort", "content": "a"}, {"reason": "stop", "content": ["yes"]}):
        with pytest.raises(GivenUp):
            read(**wrong)
    cut = read("length", content=None, reasoning_content="why")
    assert (cut.text, cut.reasoning, cut.finished) == ("", "why", False)
    assert read("stop", content="a", reasoning=" why").reasoning == " why"
    assert read("stop", content="a", reasoning_content=None, reasoning={}).reasoning == ""
    call = {"function": {"name": "f", "arguments": "{}"}}
    assert read("tool_calls", tool_calls=[{**call, "index": 0}]).calls == [call]
    for reason, message in (
        ("content_filter", {"content": "a"}),
        ("stop", {"content": " \n"}),
        ("stop", {"content": "half \ud83d"}),
        ("stop", {"tool_calls": json.dumps([call])}),
        ("stop", {"content": None, "reasoning": "why"}),
        ("length", {"content": "", "reasoning": " "}),
        ("length", {"content": "", "tool_calls": [call]}),
        ("tool_calls", {"content": "", "tool_calls": [{"function": {}}]}),
    ):
        with pytest.raises(AnswerRefused):
            read(reason, **message)
