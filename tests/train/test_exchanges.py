"""Requests and answers of the OpenAI API as rows: the answer alone is supervised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.tiny import byte_tokenizer
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from outrider.train.data.rows import RowReading, encode, interpret

ASKED = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "earlier"},
    {"role": "user", "content": "two"},
]


def line(message: Any, request: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    answered = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    asked = {"model": "m", "messages": ASKED, **(request or {})}
    return {"time": 3, "request": asked, "response": {"id": "x", "choices": [answered]}}


def supervised(record: dict[str, Any], turns: str = "chat") -> list[str]:
    tokenizer = byte_tokenizer()
    rows = encode(interpret(record, "f:1"), tokenizer, RowReading(4096, frozenset({2}), turns))
    return [
        tokenizer.decode([t for t, on in zip(row.ids, row.loss, strict=True) if on]) for row in rows
    ]


@pytest.mark.parametrize("turns", ["chat", "rows"])
def test_the_answer_alone_is_supervised(turns: str) -> None:
    answer = {"role": "assistant", "content": "answer", "refusal": None, "annotations": []}
    assert supervised(line(answer), turns) == ["answer<|im_end|>"]
    assert supervised(line(answer, stop_reason=None), turns) == ["answer<|im_end|>"]


def test_calls_and_tools_are_kept() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = interpret(line({"content": None, "tool_calls": [call]}, {"tools": tools}), "f:1")
    assert row.tools == tools and row.chat and row.complete and row.last_only
    assert row.chat[-1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"request": {"prompt": "x"}, "response": {"choices": []}}, "request has no messages"),
    ({"request": {"messages": ASKED}, "response": {"error": "busy"}}, "no choices"),
    (line({"content": ""}), "content is empty"),
    (line({"content": "x", "refusal": "no"}), "refusal"),
]


def test_malformed_lines_are_left_out_by_file_and_line(tmp_path: Path) -> None:
    path, good = tmp_path / "log.jsonl", line({"content": "answer"})
    rows = [*(bad for bad, _ in BAD), *[good] * 5]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(path=str(path), held_out=0.0, cache=False, max_bad_fraction=0.5)
    found = load_rows(cfg, byte_tokenizer(), frozenset({2}), 260, 1024)
    for number, (problem, (_, reason)) in enumerate(zip(found.bad, BAD, strict=True), 1):
        assert problem.startswith(f"{path}:{number}: ") and reason in problem
    assert len(found.lines) == 5
