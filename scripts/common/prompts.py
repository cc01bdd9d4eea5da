"""Prompt files, read and checked: MT-Bench / Spec-Bench form {"question_id", "category",
"turns": [...]}, chat rows {"messages": [...]} or ShareGPT's {"conversations": [...]}, and
plain rows {"prompt": "..."}, one JSON object a line, also mixed. And how turns become ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.jsonl import HALF, is_array, is_whole, no_array
from scripts.common.files import here

DEMO = Path(__file__).resolve().parents[1] / "prompts" / "demo.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One conversation to hold: the user's turns in order (at least one, none empty). id is
    unique in its file."""

    id: str
    category: str
    turns: list[str]


def load_prompts(path: str | Path, bad: list[dict[str, str]] | None = None) -> list[Prompt]:
    """Every prompt of a JSONL file, in order. Assistant and system messages of chat rows are
    left out: the history is always the target's own. Blank lines are skipped; rows without an
    id take their line number.

    bad: takes {name, reason} of rows that cannot be asked (no user turn, malformed), which are
    then left out. Raises UserError with file:line: no such file, malformed JSON, no turns, no
    user turn, an id twice, empty file."""
    path = here(Path(path).expanduser())
    try:
        lines = path.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # not splitlines: text may hold U+2028
    except IsADirectoryError as e:
        raise UserError(f"prompts: {path} is a folder; give a JSONL file") from e
    except UnicodeDecodeError as e:
        raise UserError(
            f"prompts: {path} is no UTF-8 text (byte {e.start}); give a JSONL file"
        ) from e
    except OSError as e:
        raise UserError(
            f"prompts: cannot read {path} ({e.strerror}); give a JSONL file, such as {DEMO}"
        ) from e
    if is_array(line.encode() for line in lines):
        raise UserError(f"prompts: {no_array(path)}")
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(line, f"{path}:{number}", number)
            if prompt.id in seen:
                raise UserError(
                    f"{path}:{number}: id {prompt.id!r} stands on line {seen[prompt.id]} "
                    "already; make ids unique"
                )
        except UserError as error:
            if bad is None:
                raise
            bad.append({"name": f"{path.name}:{number}", "reason": str(error)})
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


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        told = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise UserError(
            f"{where}: malformed JSON ({told}); every line must be one JSON object"
        ) from e
    if not isinstance(row, dict):
        raise UserError(
            f'{where}: a {type(row).__name__}, not a JSON object; write {{"prompt": "..."}}'
        )
    if "turns" in row:
        key, turns = "turns", row["turns"]
    elif "messages" in row or "conversations" in row:
        key = "messages" if "messages" in row else "conversations"
        turns = _user_turns(row[key], f"{where}: {key}")
    elif "prompt" in row:
        key, turns = "prompt", [row["prompt"]]
    else:
        known = ", ".join(map(str, list(row)[:6])) or "nothing"
        raise UserError(
            f"{where}: none of turns, messages, conversations, prompt among its keys "
            f"({known}); add one of "
            "them"
        )
    if not isinstance(turns, list) or not all(isinstance(t, str) for t in turns):
        raise UserError(f"{where}: {key} must be text (a list of strings for turns)")
    if not turns:
        raise UserError(f"{where}: {key} holds no user turn; every prompt needs at least one")
    if any(not t.strip() for t in turns):
        raise UserError(f"{where}: {key} holds an empty turn; fill or remove it")
    name = str(
        next((row[k] for k in ("question_id", "id") if row.get(k) not in (None, "")), number)
    )
    category = str(row.get("category") or "all")
    for part, texts in ((key, turns), ("id", [name]), ("category", [category])):
        if not all(map(is_whole, texts)):
            raise UserError(
                f"{where}: {part} holds {HALF}; write the whole character, or remove it"
            )
    return Prompt(name, category, list(turns))


def _user_turns(messages: Any, where: str) -> list[Any]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UserError(f'{where} must be a list of {{"role", "content"}} objects')
    return [
        m.get("content", m.get("value"))
        for m in messages
        if m.get("role", m.get("from")) in ("user", "human")
    ]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to and including the header of the assistant's turn, by
    the chat template.

    Raises UserError when the tokenizer has no chat template, the template refuses the
    messages, or one of them holds half a character."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "target: its tokenizer has no chat template; take the instruction-tuned "
            "version of the model"
        )
    for message in messages:
        if not is_whole(message["content"]):
            whose = f"the {message['role']}'s text"
            raise UserError(
                f"message: {whose} holds {HALF}; write the whole character, or remove it"
            )
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as e:
        raise UserError(
            f"target: its chat template refuses the messages ({e}); change the order of roles"
        ) from e
    return list(ids)


def user_header(tokenizer: Any) -> tuple[list[int], list[int]]:
    """(ids before the first user turn's text, ids right after it): what the Magpie idea
    prompts with, and where an invented question ends. Read off a rendered marker, so it holds
    for any template that shows the text verbatim.

    Raises UserError when the template has none of it."""
    mark = "\u241fquestion\u241f"
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "target: its tokenizer has no chat template; take the instruction-tuned "
            "version of the model"
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, after = text.partition(mark)
    if not found or not before:
        raise UserError(
            "target: its chat template shows no header before a user's text; synthesis "
            "cannot start from it"
        )
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return ids[0], ids[1]
