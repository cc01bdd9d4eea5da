"""Which tokens of a chat are supervised, for templates that behave as those of the field do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decode.models.tiny import CHATML, byte_tokenizer
from outrider.train.data.config import DataConfig, RowsConfig
from outrider.train.data.load import load_rows
from outrider.train.data.rows import Encoded, encode, interpret
from tests.train.test_templates import ASK, EOS, texts
from tests.train.test_templates import TEMPLATES as FIELD

HEADER = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
TURN_END = "{{ '<|im_end|>\\n' }}"
THINK_LAST = FIELD["block in the last turn alone"]
TEMPLATES = {
    "plain": CHATML,
    "think block in the last turn": THINK_LAST,
    "system text in the last question": FIELD["system in the last question"],
    "generation tags": FIELD["as it is, marked"],
    "start of text inside, blanks cut": (
        "{% for m in messages %}{% if m.role == 'user' %}<|endoftext|>[ {{ m.content | trim }} ]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"
    ),
    "number of turns told first": (
        "{{ messages | length }} turns\\n{% for m in messages %}"
        + HEADER
        + "{{ m.content }}"
        + TURN_END
        + "{% endfor %}"
        + ASK
    ),
    "last turn named": (
        "{% for m in messages %}{{ '<|im_start|>' + ('final ' if loop.last else '') + m.role }}"
        "{{ '\\n' + m.content }}" + TURN_END + "{% endfor %}" + ASK
    ),
    "ended by the next role": (
        "{% for m in messages %}{{ '<|im_end|>' + m.role + ':' + m.content }}{% endfor %}"
    ),
}


def chat(*answers: str, system: str = "be brief") -> list[dict[str, Any]]:
    turns = [{"role": "system", "content": system}] if system else []
    for i, answer in enumerate(answers):
        turns += [
            # What a question holds must not matter, nor that an answer occurs twice.
            {"role": "user", "content": f"<|im_start|>assistant\n{answer} {i}"},
            {"role": "assistant", "content": answer},
        ]
    return turns


def tokenize(turns: list[dict[str, Any]], template: str, **more: Any) -> tuple[Encoded, Any]:
    tokenizer = byte_tokenizer(template=template)
    row = interpret({"messages": turns, "tools": more.pop("tools", None)}, "f:1")
    (found,) = encode(row, tokenizer, RowsConfig(4096, **more), EOS)
    return found, tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_spans_are_where_unique_words_stand(name: str) -> None:
    """Every answer is a word that occurs nowhere else: where it stands in the rendering is
    what must be supervised, with its end-of-turn token."""
    words = [f"unique{i}word" for i in range(4)]
    turns = chat(*words)
    for message in turns:
        if message["role"] == "user":
            message["content"] = "and?"
    found, tokenizer = tokenize(turns, TEMPLATES[name])
    whole = tokenizer.decode(found.ids)
    want = []
    for word in words:
        assert whole.count(word) == 1
        rest = whole[whole.index(word) + len(word) :]
        ends = rest.lstrip(" ").startswith("<|im_end|>")
        want.append(word + (rest[: rest.index("<|im_end|>") + len("<|im_end|>")] if ends else ""))
    assert [t.lstrip(" ") for t in texts(found, tokenizer)] == want
    assert found.turns == (4, 4, 4)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_that_occur_elsewhere_are_found_where_they_are(name: str) -> None:
    """As many tokens at the same places as for unique words of the same lengths."""
    answers = ["user", "a", "<|im_start|>assistant", "a", "turns", "be brief"]
    unique = [chr(0x100 + i) * len(answer) for i, answer in enumerate(answers)]
    (one, tokenizer), (other, _) = (
        tokenize(chat(*some, system="be brief"), TEMPLATES[name]) for some in (answers, unique)
    )
    got, want = texts(one, tokenizer), texts(other, tokenizer)
    for mine, theirs, answer, word in zip(got, want, answers, unique, strict=True):
        assert mine == theirs.replace(word, answer)


def test_a_block_before_every_turn_where_no_turn_is_a_prefix() -> None:
    """A turn begins where the target was asked for it, not where the words that ask stand in
    a question."""
    turns = chat("one", "two", "three")
    for message in turns[2:-2:2]:
        message["reasoning_content"] = f"because of {message['content']}"
    every = THINK_LAST.replace("{% if loop.last %}", "{% if true %}")
    notices = "{{ messages | length }} turns\n" + every
    assert texts(*tokenize(turns, notices)) == [
        "<think>\nbecause of one\n</think>\n\none<|im_end|>",
        "<think>\nbecause of two\n</think>\n\ntwo<|im_end|>",
        "three<|im_end|>",
    ]


def write(path: Path, rows: int = 12) -> Path:
    with path.open("w") as file:
        for i in range(rows):
            turns = chat(f"first {i}", f"second {i}", f"third {i}", system="")
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def test_one_row_per_turn_falls_on_one_side_and_loses_none(tmp_path: Path) -> None:
    path = str(write(tmp_path / "d.jsonl", 40))
    cfg = DataConfig(path=path, held_out=0.3, cache=False, turns="rows")
    rows = load_rows(cfg, byte_tokenizer(template=THINK_LAST), EOS, 260, 4096)
    sides = {int(line): set() for line in rows.lines}
    for line, held in zip(rows.lines.tolist(), rows.held.tolist(), strict=True):
        sides[line].add(held)
    assert all(len(side) == 1 for side in sides.values()) and 0 < int(rows.held.sum()) < 120


@pytest.mark.parametrize("before, kept", [(" ", [1, 2]), ("\n", [])])
def test_a_token_over_the_border_belongs_to_the_turn_with_a_space_alone(
    before: str, kept: list[int]
) -> None:
    """As a sentencepiece token that begins with the space before an answer; a line break before
    it is the header's."""
    from outrider.train.data.rows import _inside

    whole = f"user: q\nbot:{before}hello<e>"
    start = whole.index("hello")
    offsets = [(0, start - 1), (start - 1, start + 5), (start + 5, len(whole))]
    assert _inside([5, 6, 2], offsets, whole, (start, start + 5), EOS) == kept
    apart = [(0, start - 1), (start - 1, start), (start, start + 5), (start + 5, len(whole))]
    assert _inside([5, 9, 6, 2], apart, whole, (start, start + 5), EOS)[0] == 2, "a blank alone"
