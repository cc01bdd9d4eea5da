"""Prompt files, read and checked: MT-Bench / Spec-Bench form {"question_id", "category",
"turns": [...]}, chat rows {"messages": [...]} or ShareGPT's {"conversations": [...]}, and
plain rows {"prompt": "..."}, one JSON object a line, also mixed. And how turns become ids."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import HALF, is_whole, parse_line, read_lines
from outrider.scripts.common.files import here
from outrider.scripts.common.names import DEMO
from outrider.train.data.spans import arguments


@dataclass(frozen=True)
class Prompt:
    """One conversation to hold: the user's turns in order (at least one, none empty). id is
    unique in its file."""

    id: str
    category: str
    turns: list[str]


def load_prompts(path: str | Path, bad: list[dict[str, str]] | None = None) -> list[Prompt]:
    """Return every prompt of a JSONL file, in order. Assistant and system messages of chat
    rows are left out: the history is always the target's own. Blank lines are skipped; rows
    without an id take their line number.

    bad: takes {name, reason} of rows that cannot be asked (no user turn, malformed), which are
    then left out. Raises UserError with file:line: no such file, malformed JSON, no turns, no
    user turn, an id twice, empty file."""
    path = here(Path(path).expanduser())
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in read_lines(path, "prompts", fix=f"give a JSONL file, such as {DEMO}"):
        try:
            prompt = _prompt(line, number)
            if prompt.id in seen:
                raise ValueError(
                    f"id {prompt.id!r} is on line {seen[prompt.id]} already; make ids unique"
                )
        except ValueError as error:
            if bad is None:
                raise UserError(f"{path}:{number}: {error}") from None
            bad.append({"name": f"{path.name}:{number}", "reason": f"{path}:{number}: {error}"})
            continue
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts and bad:
        raise UserError(f"{bad[0]['reason']} (and no other line of {path} holds a prompt)")
    if not prompts:
        raise UserError(
            f'{path}: the file holds no prompt; give a line such as {{"prompt": "Hello"}}'
        )
    return prompts


def _prompt(line: bytes, number: int) -> Prompt:
    """Raise ValueError in a user's words."""
    try:
        row = parse_line(line)
    except ValueError as error:
        raise ValueError(f"{error}; every line must be one JSON object") from None
    turns = [message["content"] for message in requested(*spoken(row))]
    given = [row[k] for k in ("question_id", "id") if row.get(k) not in (None, "")]
    name = str([*given, number][0])
    category = str(row.get("category") or "all")
    _whole("id", name)
    _whole("category", category)
    return Prompt(name, category, turns)


def spoken(row: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """Return the key of a row that holds its turns, and their (role, content), whatever the
    form: turns, messages, ShareGPT's conversations (whose human is a user here), prompt.

    Raises ValueError in a user's words."""
    if not isinstance(row, dict):
        raise ValueError(f'is a {type(row).__name__}, not a JSON object; write {{"prompt": "..."}}')
    there = [key for key in ("turns", "messages", "conversations", "prompt") if key in row]
    if not there:
        known = ", ".join(map(str, list(row)[:6])) or "nothing"
        raise ValueError(
            f"has none of turns, messages, conversations, prompt among its keys ({known}); add "
            "one of them"
        )
    key = next((key for key in there if row[key]), there[0])
    turns = [row[key]] if key == "prompt" else row[key]
    if key in ("turns", "prompt"):
        if not isinstance(turns, list):
            raise ValueError(f"{key} must be a list of texts")
        return key, [("user", text) for text in turns]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f'{key} must be a list of {{"role", "content"}} objects')
    found = [(t.get("role", t.get("from")), t.get("content", t.get("value"))) for t in turns]
    return key, [("user" if role == "human" else role, text) for role, text in found]


def requested(
    key: str, turns: list[tuple[Any, Any]], roles: tuple[str, ...] = ("user",)
) -> list[dict[str, str]]:
    """Return those turns of `spoken` that have one of `roles`, as messages. Raises
    ValueError in a user's words: no user turn, one of them empty or no text."""
    kept = [{"role": role, "content": text} for role, text in turns if role in roles]
    for message in kept:
        if not isinstance(message["content"], str):
            raise ValueError(f"{key} must be text, and holds a turn that is none")
        if not message["content"].strip():
            raise ValueError(f"{key} holds an empty turn; fill or remove it")
        _whole(key, message["content"])
    if not any(message["role"] == "user" for message in kept):
        raise ValueError(f"{key} holds no user turn; every prompt needs at least one")
    return kept


def _whole(key: str, text: str) -> None:
    if not is_whole(text):
        raise ValueError(f"{key} holds {HALF}; write the whole character, or remove it")


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], **template: Any) -> list[int]:
    """Return token ids of a conversation up to and including the header of the assistant's
    turn, by the chat template. template: further arguments of it.

    Raises UserError when the tokenizer has no chat template, the template refuses the
    messages or shows less than they say, or one of them holds no text or half a character."""
    from jinja2 import TemplateError

    _check_template(tokenizer)

    def render(turns: list[dict[str, Any]], tokenize: bool = False) -> Any:
        return tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False, tokenize=tokenize, **template
        )

    try:
        told = [_turn(message) for message in messages]
        ids = list(render(told, tokenize=True))
    except ValueError as error:
        raise UserError(f"message: {error}") from None
    except TemplateError as error:
        raise UserError(
            f"target: its chat template refuses the messages ({error}); change the order of roles"
        ) from None
    for place, turn in enumerate(told):
        for key, less in _without(turn):
            with contextlib.suppress(TemplateError):  # it asks for what is left out
                if render([*told[:place], less, *told[place + 1 :]]) == render(told):
                    raise UserError(
                        f"message: the target's chat template does not show {key} of a turn of "
                        f"{turn['role']}; leave it out"
                    )
    return ids


def _without(turn: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a template may leave out, and the turn without it. Every template shows a user's
    text, and that of an answer without a tool call."""
    plain = turn["role"] == "user" or (turn["role"] == "assistant" and "tool_calls" not in turn)
    if turn["content"].strip() and not plain:
        yield "content", {**turn, "content": ""}
    for key in turn.keys() - {"role", "content", "tool_call_id"}:
        yield key, {k: v for k, v in turn.items() if k != key}


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it. Raises ValueError in a user's words."""
    turn = {k: v for k, v in message.items() if v or (k == "content" and v is not None)}
    calls = turn.get("tool_calls")
    if not isinstance(role := turn.get("role"), str):
        raise ValueError("a turn has no role; give user, assistant or system")
    if not isinstance(turn.setdefault("content", "" if calls else None), str):
        raise ValueError(f"the content of a turn of {role} is no text")
    if calls:
        turn["tool_calls"] = arguments(calls)
    _whole(f"the {role}'s text", json.dumps(turn, ensure_ascii=False, default=str))
    return turn


def question_ids(tokenizer: Any, text: str) -> list[int]:
    """Return token ids of a conversation that begins with this question, as `chat_ids`
    makes them."""
    return chat_ids(tokenizer, [{"role": "user", "content": text}])


def thinned(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """At most `count` prompts (None: all) in their order, one category after the other."""
    place, seen = [], Counter[str]()
    for i, p in enumerate(prompts):
        place.append((seen[p.category], i))
        seen[p.category] += 1
    return [prompts[i] for i in sorted(i for _, i in sorted(place)[:count])]


def _check_template(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "target: its tokenizer has no chat template; take the instruction-tuned version of the "
            "model"
        )


def user_header(tokenizer: Any) -> tuple[list[int], list[int]]:
    """(ids before the first user turn's text, ids right after it): what the Magpie idea
    prompts with, and where an invented question ends. Read off a rendered marker, so it holds
    for any template that shows the text verbatim.

    Raises UserError when the template has none of it."""
    mark = "\u241fquestion\u241f"
    _check_template(tokenizer)
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, after = text.partition(mark)
    if not found or not before:
        raise UserError(
            "target: its chat template shows no header before a user's text; synthesis "
            "cannot start from it"
        )
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return ids[0], ids[1]
