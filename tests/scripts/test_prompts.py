"""Prompt files: every form, every mistake with file:line, and the prompts that come with the
project.
"""

import json
import re
from collections import Counter
from pathlib import Path

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
        ('["a"]', "not a JSON object"),
        ('{"question": "a"}', "none of turns, messages, conversations, prompt.*question"),
        ('{"turns": []}', "no user turn"),
        ('{"turns": ["a", " "]}', "empty turn"),
        ('{"turns": "a"}', "turns must be a list of texts"),
        ('{"turns": [1]}', "turns must be text"),
        ('{"prompt": null}', "prompt must be text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user turn"),
        ('{"messages": ["a"]}', "messages must be a list"),
        ('{"prompt": "b", "id": "x"}', "line 1 already"),
        ('{"prompt": "cut \\ud83d"}', "prompt holds half of a surrogate pair"),
        ('{"turns": ["a", "\\udc00 cut"]}', "turns holds half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages holds half"),
        ('{"prompt": "b", "id": "\\ud83d"}', "id holds half"),
        ('{"prompt": "b", "category": "\\ud83d"}', "category holds half"),
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


def test_unreadable_files(tmp_path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    cases = (
        (empty, "no prompt"),
        (binary, "UTF-8"),
        (tmp_path, "cannot read .*Is a directory"),
        (tmp_path / "no", "cannot read"),
    )
    for path, message in cases:
        with pytest.raises(UserError, match=message):
            load_prompts(path)


def test_demo_prompts_cover_eight_categories() -> None:
    prompts = load_prompts(DEMO)
    counts = Counter(p.category for p in prompts)
    assert set(counts) == {
        "writing",
        "qa",
        "summarization",
        "translation",
        "math",
        "code",
        "rag",
        "multi_turn",
    }
    assert len(prompts) >= 80 and min(counts.values()) >= 10
    assert all(len(p.turns) == (2 if p.category == "multi_turn" else 1) for p in prompts)
    openings = [frozenset(re.findall(r"\w+", p.turns[0].casefold())) for p in prompts]
    for i, one in enumerate(openings):
        for other in openings[:i]:
            assert len(one & other) / len(one | other) < 0.7, (one, other)
    assert all(
        60 <= len(p.turns[0].split()) <= 170
        for p in prompts
        if p.category in ("summarization", "rag")
    )
    tokenizer = byte_tokenizer()
    longest = max(
        len(chat_ids(tokenizer, [{"role": "user", "content": t}])) for p in prompts for t in p.turns
    )
    assert longest < 1000  # fits the tiny target's context


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
