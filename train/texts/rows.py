"""From raw rows to token ids and a loss mask; a row that cannot be used says why.

The mask comes from the chat template itself: from its generation tags where it has them,
otherwise from prefix differences (the text rendered up to an assistant turn, with and without
that turn). Text is never searched for. An assistant span ends with its end-of-turn token: what
the template writes after it, the target never generates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.jsonl import MAX_LINE, is_array, no_array, parse_line

ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
}
Message = dict[str, str]


@dataclass
class BadRow(Exception):
    """A row that is left out. where: "file:line"."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class Row:
    """A usable raw row. chat: messages, or None for plain `text`. complete: the last answer
    reached its end.
    """

    where: str
    chat: list[Message] | None
    text: str = ""
    complete: bool = True


def read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    """Rows of a JSONL file, one per line that is not blank; `where` is file:line. Raises
    UserError without a file, and for one that holds a single JSON array, as ShareGPT is handed
    around."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(
            f"data.path: cannot read {path} ({error.strerror}); give an existing JSONL file"
        ) from None
    with stream:
        if is_array(iter(lambda: stream.readline(MAX_LINE), b"")):
            raise UserError(f"data.path: {no_array(path)}")
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _checked(f"{path}:{number}", lambda line=line: parse_line(line))  # type: ignore[misc]


def read_text(path: Path) -> Iterator[Row | BadRow]:
    """Paragraph groups of a plain text file, split at blank lines; `where` names the first
    line of each.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(
            f"data.path: cannot read {path} ({error.strerror}); give an existing text file"
        ) from None
    start, part = 1, b""
    for number, line in enumerate([*lines, b"\n"], 1):
        if line.strip():
            start, part = (start, part + line) if part else (number, line)
        elif part:
            yield _checked(f"{path}:{start}", lambda part=part: {"text": part.decode()})  # type: ignore[misc]
            part = b""


def read_records(records: Iterable[Any], name: str) -> Iterator[Row | BadRow]:
    """Rows of a `datasets` data set; `where` is name:row, counted from 0."""
    for number, record in enumerate(records):
        yield _checked(f"{name}:{number}", lambda record=record: record)  # type: ignore[misc]


def _checked(where: str, get: Any) -> Row | BadRow:
    try:
        return interpret(get(), where)
    except ValueError as error:
        return BadRow(where, str(error))


def interpret(record: Any, where: str) -> Row:
    """The Row in a record with `messages`, ShareGPT `conversations` or `text`. Raises
    ValueError in a user's words.
    """
    if not isinstance(record, dict):
        raise ValueError("is not an object {..}")
    turns = record.get("messages") or record.get("conversations")
    if turns is None and isinstance(record.get("text"), str):
        if not record["text"].strip():
            raise ValueError("text is empty")
        return Row(where, None, _clean(record["text"], "text"))
    if turns is None:
        keys = ", ".join(sorted(map(str, record)))[:80]
        raise ValueError(f"has none of messages, conversations, text; its keys: {keys or 'none'}")
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError("its turns are not a list with something in it")
    chat = [_message(turn, i) for i, turn in enumerate(turns)]
    body = chat[1:] if chat[0]["role"] == "system" else chat
    for i, message in enumerate(body):
        wanted = ("user", "assistant")[i % 2]
        if message["role"] == "system":
            raise ValueError(f"turn {i}: a system turn may only stand first")
        if message["role"] != wanted and "tool" not in {m["role"] for m in body}:
            raise ValueError(f"turn {i}: role {message['role']!r} where {wanted!r} is due")
    if not any(m["role"] == "assistant" for m in chat):
        raise ValueError("has no assistant turn")
    return Row(where, chat, complete=record.get("complete", True) is not False)


def _message(turn: Any, i: int) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {i} is not an object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"turn {i}: unknown role {role!r}")
    if not isinstance(content, str):
        raise ValueError(f"turn {i}: content is {type(content).__name__}, not text")
    if not content.strip():
        raise ValueError(f"turn {i}: content is empty")
    return {"role": ROLES[role], "content": _clean(content, f"turn {i}")}


def _clean(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what}: holds half of a surrogate pair") from None
    if "\0" in text:
        raise ValueError(f"{what}: holds a NUL character")
    return text


def encode(
    row: Row, tokenizer: Any, eos_ids: Iterable[int], max_length: int
) -> list[tuple[list[int], list[bool]]]:
    """Token ids and loss mask of a row; a plain text may give several windows of max_length.

    Raises BadRow when nothing, or everything, of a chat is supervised, and UserError without a
    chat template.
    """
    if row.chat is None:
        ids = tokenizer(row.text, add_special_tokens=False)["input_ids"]
        windows = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
        return [(w, [False] + [True] * (len(w) - 1)) for w in windows if len(w) > 1]
    template = tokenizer.chat_template or ""
    if not template:
        raise UserError(
            f"target: its tokenizer has no chat template, which {row.where} needs; take the "
            'instruction-tuned version of the model, or train on plain text ({"text": '
            '".."}, data=text)'
        )
    try:
        tagged = "{% generation" in template or "{%- generation" in template
        ids, mask = _by_tags(row.chat, tokenizer) if tagged else _by_prefix(row.chat, tokenizer)
    except ValueError as error:
        raise BadRow(row.where, str(error)) from None
    except (
        Exception
    ) as error:  # templates raise jinja errors of many kinds for turns they do not like
        raise BadRow(
            row.where, f"the chat template refuses it ({str(error).splitlines()[0][:120]})"
        ) from None
    mask = _end_at_eos(ids, mask, frozenset(eos_ids), row.complete)
    ids, mask = ids[:max_length], mask[:max_length]
    if not any(mask):
        raise BadRow(row.where, f"no supervised token within data.max_length={max_length} tokens")
    if all(mask):
        raise BadRow(
            row.where, "every token is supervised: the template marks the prompt as the assistant's"
        )
    return [(ids, mask)]


def _by_tags(chat: list[Message], tokenizer: Any) -> tuple[list[int], list[bool]]:
    out = tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]


def _by_prefix(chat: list[Message], tokenizer: Any) -> tuple[list[int], list[bool]]:
    def render(turns: list[Message], ask: bool = False) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)

    whole, spans = render(chat), []
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before, after = render(chat[:i], True), render(chat[: i + 1])
        # Some templates render earlier turns differently (they drop the reasoning): such a
        # turn is not supervised.
        if after.startswith(before) and whole.startswith(after):
            spans.append((len(before), len(after)))
    if not spans:
        raise ValueError(
            "the chat template does not render an assistant turn as prompt plus answer"
        )
    if getattr(tokenizer, "is_fast", False):
        out = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = out["input_ids"], out["offset_mapping"]
        mask, at = [False] * len(ids), 0
        for t, (start, end) in enumerate(offsets):
            while at < len(spans) and start >= spans[at][1]:
                at += 1
            mask[t] = at < len(spans) and start >= spans[at][0] and end <= spans[at][1]
        return ids, mask
    ids = tokenizer(whole, add_special_tokens=False)[
        "input_ids"
    ]  # no offsets: count tokens of the two prefixes
    mask = [False] * len(ids)
    for start, end in spans:
        cuts = [tokenizer(whole[:c], add_special_tokens=False)["input_ids"] for c in (start, end)]
        if ids[: len(cuts[0])] == cuts[0] and ids[: len(cuts[1])] == cuts[1]:
            mask[len(cuts[0]) : len(cuts[1])] = [True] * (len(cuts[1]) - len(cuts[0]))
    return ids, mask


def _end_at_eos(
    ids: list[int], mask: list[bool], eos: frozenset[int], complete: bool
) -> list[bool]:
    """Every span ends with its first end-of-turn token. An answer that was cut off has no end:
    there the token is the template's word, not the target's, and is not supervised."""
    out, ended, last = list(mask), False, -1
    for t, on in enumerate(mask):
        if not on:
            ended = False
        elif ended:
            out[t] = False
        elif ids[t] in eos:
            ended, last = True, t
    if not complete and last >= 0 and not any(out[last + 1 :]):
        out[last] = False
    return out
