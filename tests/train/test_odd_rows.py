"""Rows as people have them: of each, exactly what the target would write is supervised, or the
row is left out by name. Nothing is lost or gained in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from outrider.decode.models.facts import eos_ids
from outrider.decode.models.tiny import byte_tokenizer
from outrider.train.data.batches import JoinedRows
from outrider.train.data.config import DataConfig
from outrider.train.data.load import load_rows
from tests.helpers.training import tiny_target
from tests.train.test_templates import CALL, TEMPLATES, TOOLS, apart

E = "<|im_end|>"
BOS = "<|endoftext|>"  # id 0
THINK = "<think>\nwhy\n</think>\n\n"


class Odd(NamedTuple):
    """row: of the file. want: what is supervised, turn by turn, or the words of the refusal.
    said: what the header tells of it. template: a name of TEMPLATES. keys: of the data."""

    row: dict[str, Any]
    want: tuple[str, ...] | str
    said: str = ""
    template: str = "as it is"
    keys: dict[str, Any] = {}


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    """A row of turns: a text (of the user and the assistant by turns) or a whole turn."""
    roles = ("user", "assistant")
    found = [t if isinstance(t, dict) else {"content": t} for t in turns]
    return {"messages": [{"role": roles[i % 2], **t} for i, t in enumerate(found)], **more}


def shared(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


def system(*turns: Any, role: str = "system", **more: Any) -> dict[str, Any]:
    row = chat(*turns, **more)
    return {**row, "messages": [{"role": role, "content": "be brief"}, *row["messages"]]}


def parts(*texts: Any) -> list[Any]:
    return [{"type": "text", "text": t} if isinstance(t, str) else t for t in texts]


CALLED = chat(
    "what?",
    {"content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a thing"},
    "it is",
)
SPOKE = {"messages": [{**m, "content": m["content"] or "I look."} for m in CALLED["messages"]]}
CALLS = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
TOOLED, LAST = "calls beside the text", "block in the last turn alone"
RECORD = {
    "request": {"messages": [{"role": "user", "content": "q"}], "stop": ["x"]},
    "response": {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]},
}

ODD = {
    # a system text, beside the turns or in them
    "system beside": Odd(chat("q", "a", system="be brief"), ("a" + E,)),
    "system beside and the same in the turns": Odd(
        system("q", "a", system_prompt="be brief"), ("a" + E,)
    ),
    "system beside and another in the turns": Odd(
        system("q", "a", system="be long"), "another one in them"
    ),
    "several system messages": Odd(
        {"messages": 2 * [{"role": "system", "content": "s"}] + chat("q", "a")["messages"]},
        ("a" + E,),
    ),
    "a system message that the template refuses": Odd(
        system("q", "a"), "no system", template="no system"
    ),
    "a developer message": Odd(system("q", "a", role="developer"), ("a" + E,)),
    "system in the last question": Odd(
        system("q", "a", "r", "b"), ("a" + E, "b" + E), template="system in the last question"
    ),
    # what is not to be learned
    "a turn of weight 0": Odd(
        chat("q", {"content": "a", "weight": 0}, "r", "b"), ("b" + E,), "1 not learned"
    ),
    "a turn of loss false, marked by the template": Odd(
        chat("q", {"content": "a", "loss": False}, "r", "b"),
        ("b" + E,),
        "1 not learned",
        "as it is, marked",
    ),
    "a turn of weight 0, a row for each": Odd(
        chat("q", {"content": "a", "trainable": 0.0}, "r", "b"), ("b" + E,), keys={"turns": "rows"}
    ),
    "a row of train false": Odd(chat("q", "a", train=False), ()),
    "a weight of a half": Odd(chat("q", {"content": "a", "weight": 0.5}), "0 (not to be learned)"),
    "a weight on the question": Odd(chat({"content": "q", "weight": 1}, "a"), ("a" + E,)),
    "the last turn alone, of weight 0": Odd(
        chat("q", "a", "r", {"content": "b", "weight": 0}), (), keys={"last_turn_only": True}
    ),
    # tools
    "a call": Odd({**CALLED, "tools": TOOLS}, (CALLS + E, "it is" + E), template=TOOLED),
    "words and a call": Odd(
        {**SPOKE, "tools": TOOLS}, ("I look." + CALLS + E, "it is" + E), template=TOOLED
    ),
    "a call that the template passes over": Odd(CALLED, "does not show the tool_calls of turn 1"),
    "tools that the template passes over": Odd(chat("q", "a", tools=TOOLS), "does not show tools"),
    "an old function_call": Odd(
        chat("q", {"content": None, "function_call": {"name": "f"}}), "holds function_call"
    ),
    # reasoning
    "reasoning apart": Odd(
        chat("q", apart("why", "a")), (THINK + "a" + E,), template="block in the last turn alone"
    ),
    "reasoning of an earlier turn that is cut off": Odd(
        chat("q", apart("why", "a"), "r", apart("why", "b")),
        ("a" + E, THINK + "b" + E),
        "1 without their reasoning",
        LAST,
    ),
    "reasoning that the template passes over": Odd(
        chat("q", apart("why", "a")), "does not show the reasoning_content of turn 1"
    ),
    # turns that are empty, wrong or of another form
    "an empty answer": Odd(chat("q", "a", "r", ""), "turn 3: content is empty"),
    "a greeting before the first question": Odd(
        shared(("gpt", "hello"), ("human", "q"), ("gpt", "a")), ("a" + E,), "1 before the first"
    ),
    "a question without its answer at the end": Odd(chat("q", "a", "r"), ("a" + E,)),
    "ShareGPT with system and names of others": Odd(
        shared(("system", "s"), ("human", "q"), ("chatgpt", "a")), ("a" + E,)
    ),
    "both forms at once": Odd(
        {**chat("q", "a"), **shared(("human", "q"), ("gpt", "b"))},
        ("a" + E,),
        "key conversations",
    ),
    "documents": Odd(chat("q", "a", documents=["d"]), "holds documents"),
    "keys that nobody knows": Odd(chat("q", "a", score=1, id="x"), ("a" + E,), "key score"),
    "words that look like the end of a turn": Odd(
        chat("q", f"a{E}b"), "does not show all of turn 1"
    ),
    # parts, pictures
    "a list of texts": Odd(
        chat({"content": parts("q", "!")}, {"content": parts("a", "b")}), ("ab" + E,)
    ),
    "lists in lists": Odd(chat({"content": [parts("q")]}, "a"), "a part that is 'list'"),
    "a picture": Odd(chat({"content": parts("q", {"type": "image"})}, "a"), "turn 0 holds image"),
    "pictures beside": Odd(chat("<image>q", "a", images=["p.png"]), "holds images"),
    # rows of tokens, plain text
    "tokens": Odd({"input_ids": [5, 6, 7]}, ("\x03\x04",)),
    "tokens of which none is supervised": Odd({"input_ids": [5], "loss_mask": [1]}, "no super"),
    "tokens that are words": Odd({"input_ids": ["a"]}, "not a list of token ids"),
    "tokens with a mask": Odd(
        {"input_ids": [5, 6, 7, 2], "loss_mask": [0, 0, 1, 1]}, ("\x04" + E,)
    ),
    "tokens with the mask as labels": Odd(
        {"input_ids": [5, 6, 7, 2], "labels": [-100, -100, 7, 2]}, ("\x04" + E,)
    ),
    "tokens with a mask too short": Odd({"input_ids": [5, 6], "loss_mask": [1]}, "loss_mask"),
    "tokens of weight 0": Odd({"input_ids": [5, 6, 7], "weight": 0}, ()),
    "tokens with attention_mask 0 behind": Odd(
        {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0]}, "attention_mask hides"
    ),
    "tokens with a mask of lists": Odd({"input_ids": [5, 6], "loss_mask": [[0], [1]]}, "loss_mask"),
    "tokens beside messages": Odd(chat("q", "a", input_ids=[5, 6]), ("\x03",), "key messages"),
    "a system text beside plain text": Odd({"text": "abc", "system": "s"}, ("bc",), "key system"),
    "plain text": Odd({"text": "abc"}, ("bc",)),
    "plain text with BOS": Odd({"text": "abc"}, ("abc",), "1 BOS", keys={"bos": True}),
    "a chat with BOS": Odd(chat("q", "a"), ("a" + E,), "1 BOS", keys={"bos": True}),
    "plain text of train false": Odd({"text": "abc", "train": False}, ()),
    # exchanges of a server
    "a request with arguments for the template": Odd(
        {**RECORD, "request": {**RECORD["request"], "chat_template_kwargs": {"thinking": False}}},
        "its request holds chat_template_kwargs",
    ),
    "an exchange of weight 0": Odd({**RECORD, "weight": 0}, ()),
    "a chat that was cut": Odd(chat("q", "a", complete=False), ("a",)),
    # lengths and ends
    "a turn beyond the limit": Odd(
        chat("q", "a", "r" * 99, "b"),
        ("a" + E,),
        "1 beyond data.max_length",
        keys={"max_length": 99},
    ),
    "tags that leave the end of a turn out": Odd(
        chat("q", "a"), ("a" + E,), template="as it is, marked but for the end"
    ),
    "a longer end behind the last turn": Odd(
        chat("q", "a", "r", "b"),
        ("a" + E, "b<|endoftext|>"),
        "",
        "a longer end behind the last turn",
        {"ends": "tokenizer"},
    ),
}


HOLDERS = ("config", "generation config", "tokenizer", "template")
ODD |= {
    f"an end of turns that the {holder} alone names": Odd(
        chat("q", "a", "r", "b"), ("a" + E, "b" + E), keys={"ends": holder}
    )
    for holder in HOLDERS
}


def read(tmp_path: Path, odd: Odd) -> JoinedRows:
    """The tokens of an odd row and of a good one behind it."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (odd.row, chat("good", "good"))))
    keys = {"held_out": 0.0, "cache": False, "max_bad_fraction": 1.0, **odd.keys}
    tokenizer, ends = byte_tokenizer(template=TEMPLATES[odd.template]), (2,)
    if holder := keys.pop("ends", ""):
        ends = named(holder, tokenizer)
    if keys.pop("bos", False):
        post = TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
        tokenizer.bos_token, tokenizer._tokenizer.post_processor = BOS, post
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return load_rows(DataConfig(path=str(path), **keys), tokenizer, ends, 260, 512)


def named(holder: str, tokenizer: Any) -> tuple[int, ...]:
    """What ends a turn where `holder` says what it is, and the others say another or nothing."""
    model = tiny_target().model
    model.config.eos_token_id = 2 if holder == "config" else 0
    model.generation_config.eos_token_id = [0, 2] if holder == "generation config" else None
    tokenizer.eos_token = E if holder == "tokenizer" else "<|endoftext|>"
    shown = tokenizer.chat_template
    tokenizer.chat_template = shown if holder == "template" else None
    found = eos_ids(model, tokenizer)
    tokenizer.chat_template = shown
    return found


def taught(rows: JoinedRows) -> tuple[str, ...]:
    """The supervised stretches of text of the first line's rows."""
    found: list[str] = []
    for row in (rows.lines == 1).nonzero()[:, 0].tolist():
        part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        shown = byte_tokenizer().decode(torch.where(rows.loss[part], rows.ids[part], 259))
        found += filter(None, shown.split("<|reserved_259|>"))
    return tuple(found)


@pytest.mark.parametrize("name", ODD)
def test_nothing_is_learned_or_left_out_in_silence(name: str, tmp_path: Path) -> None:
    odd = ODD[name]
    rows = read(tmp_path, odd)
    begins = rows.ids[: int(rows.offsets[1])].tolist().count(0)
    header = f"{rows.supervision()}; {rows.counted}; {begins} BOS"
    if isinstance(odd.want, str):
        assert rows.lines.tolist() == [2] and odd.want in rows.bad[0], (rows.bad, taught(rows))
    else:
        assert not rows.bad and taught(rows) == odd.want
        assert odd.said in header
        assert odd.want or "1 not learned" in header, "a row that is not learned is counted"
