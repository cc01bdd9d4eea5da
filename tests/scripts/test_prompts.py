"""Prompt files: every form, every mistake with file:line, and the prompts that come with the
project.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.decode.models.tiny import byte_tokenizer
from outrider.scripts.common.files import sha256
from outrider.scripts.common.prompts import DEMO, Prompt, chat_ids, load_prompts, user_header


def test_all_forms(tmp_path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"], "reference": ["x"]},
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "A"},
                {"role": "assistant", "content": "B"},
                {"role": "user", "content": "C"},
            ]
        },
        {"prompt": "P\u2028Q", "id": "mine", "category": "chat"},
        {
            "id": "s",
            "conversations": [{"from": "human", "value": "E"}, {"from": "gpt", "value": "F"}],
        },
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    assert load_prompts(path) == [
        Prompt("81", "writing", ["One", "Two"]),
        Prompt("3", "all", ["A", "C"]),
        Prompt("mine", "chat", ["P\u2028Q"]),
        Prompt("s", "all", ["E"]),
    ]
    path.write_text(json.dumps(rows, indent=1))
    with pytest.raises(UserError, match="p.jsonl is one JSON array, not an object a line"):
        load_prompts(path, [])


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"turns": ["a"', "is not JSON.*every line must be one JSON object"),
        ('{"question": "a"}', "none of turns, messages, conversations, prompt.*question"),
        ('{"turns": []}', "no user turn"),
        ('{"turns": ["a", " "]}', "empty turn"),
        ('{"prompt": null}', "prompt must be text"),
        ('{"prompt": "b", "id": "x"}', "line 1 already"),
        ('{"prompt": "cut \\ud83d"}', "prompt holds half of a surrogate pair"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "id": "x"}\n' + line + "\n")
    with pytest.raises(UserError, match=re.escape(f"{path}:2: ") + ".*" + message):
        load_prompts(path)


def test_the_projects_own_prompts_are_found_from_any_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = "scripts/prompts/demo.jsonl"
    assert load_prompts(mine) == load_prompts(DEMO) and sha256(Path(mine)) == sha256(DEMO)
    (tmp_path / "scripts" / "prompts").mkdir(parents=True)
    (tmp_path / mine).write_text('{"prompt": "own"}')
    assert [p.turns for p in load_prompts(mine)] == [["own"]]


def test_a_file_without_a_prompt(tmp_path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="no prompt"):
        load_prompts(tmp_path / "empty")


QWEN = (
    "{% for m in messages %}{% if m.role in ('user', 'system') or not m.tool_calls and m.role == "
    "'assistant' %}{{ m.role + ':' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ m.tool_calls[0].function.arguments.x }}{% endif %};{% endfor %}"
)
CALL = [{"type": "function", "function": {"name": "f", "arguments": '{"x": "here"}'}}]


def test_what_a_message_says_is_in_the_prompt_or_refused() -> None:
    tokenizer = byte_tokenizer(template=QWEN)
    user: dict[str, Any] = {"role": "user", "content": "a"}
    called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": CALL}
    assert "here" in tokenizer.decode(chat_ids(tokenizer, [user, called, user]))
    plain = chat_ids(tokenizer, [user])
    assert plain == chat_ids(tokenizer, [{**user, "name": None, "annotations": []}])
    for turn, said in (
        ({**called, "content": "look"}, "does not show content of a turn of assistant"),
        ({"role": "developer", "content": "b"}, "does not show content of a turn of developer"),
        ({**user, "name": "Ada"}, "does not show name"),
        ({**called, "tool_calls": [{}]}, "no function name"),
        ({"role": "assistant", "content": None}, "is no text"),
        ({"role": "user", "content": "half \ud800"}, "half"),
    ):
        with pytest.raises(UserError, match=said):
            chat_ids(tokenizer, [user, turn])


def test_header_and_end_of_the_user_turn() -> None:
    tokenizer = byte_tokenizer()
    before, after = user_header(tokenizer)
    assert tokenizer.decode(before) == "<|im_start|>user\n" and after[0] == tokenizer.eos_token_id
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(UserError, match="no header"):
        user_header(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        chat_ids(tokenizer, [{"role": "user", "content": "a"}])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        chat_ids(tokenizer, [])
