"""From raw rows to token ids and a loss mask; a row that cannot be used says why.

The mask comes from the chat template itself: from its generation tags where it has them,
otherwise from renderings with a turn replaced (train/data/spans.py). Answers are never
searched for. An assistant span ends with its end-of-turn token: what the template writes after
it, the target never generates. What a row holds beside text (tool calls, tools, reasoning) is
handed to the template; a row of which the template would show less than there is is left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.errors import UserError, first_line
from outrider.conf.jsonl import is_whole, parse_line
from outrider.train.data import spans
from outrider.train.data.config import RowsConfig
from outrider.train.data.spans import REASONING, Message, Span, Template

ROLES = {role: role for role in ("system", "user", "assistant", "tool", "developer")}
ROLES |= {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model"), "assistant"),
}
FIRST = ("system", "developer")  # roles that stand before the first question
# Keys of a turn, or a row, that say by 0 or false that it is not to be learned.
LEARNED = ("weight", "loss", "loss_mask", "train", "trainable")
OWN = ("role", "from", "content", "value", *LEARNED)  # keys of a turn that are read here
CHATS = ("messages", "conversations")  # keys of a row that hold its turns
SYSTEM = ("system", "system_prompt")  # keys of a row that hold a text before its turns
# Keys, and types of a turn's parts, that change what a target sees and are not read: a row, or
# a turn, with one is left out.
UNREAD = (
    *("documents", "images", "image", "image_url", "input_image", "videos", "video", "video_url"),
    *("audios", "audio", "audio_url", "input_audio"),
    *("functions", "function_call", "chat_template_kwargs"),
)
# Keys of a row of tokens that say which of them are supervised; `labels` by what is not -100.
MASKS = ("loss_mask", "labels", "completion_mask", "assistant_masks")
NONE, ALL = frozenset[int](), frozenset({0})  # what of a row that is no chat is not learned
Item = tuple[int, Any]  # number and content of a row: a line of JSONL, or a record


@dataclass
class BadRow(Exception):
    """A row that is left out. where: "file:line"."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass
class ChatRow:
    """A usable raw row. chat: messages, or None for plain `text`, and for `ids`, tokens as
    they are, of which `loss` are supervised. complete: the last answer reached its end. tools:
    functions that the chat offers, for the template. dropped: turns of the assistant's before
    the first question, which are left out. last_only: only the last answer is supervised.
    unlearned: which of the assistant's turns are not, as they say themselves. passed: keys
    that were not read.
    """

    where: str
    chat: list[Message] | None
    text: str = ""
    complete: bool = True
    tools: list[Any] | None = None
    dropped: int = 0
    last_only: bool = False
    unlearned: frozenset[int] = frozenset()
    passed: frozenset[str] = frozenset()
    ids: list[int] | None = None
    loss: list[bool] = field(default_factory=list)


class Encoded(NamedTuple):
    """A row of tokens. loss: which are supervised. turns: of its assistant turns so many were
    asked for, so many the template shows, and so many are supervised at least in part (the
    others lie beyond data.max_length). hidden: of so many the template cuts the reasoning off,
    as it does of all but the last one."""

    ids: list[int]
    loss: list[bool]
    turns: tuple[int, int, int] = (0, 0, 0)
    hidden: int = 0


def read_row(content: Any, where: str) -> ChatRow:
    """Return the row in a line of a JSONL file (bytes), or in a record. Raises BadRow."""
    try:
        return interpret(parse_line(content) if isinstance(content, bytes) else content, where)
    except ValueError as error:
        raise BadRow(where, str(error)) from None


def read_text(path: Path) -> Iterator[Item]:
    """Paragraph groups of a plain text file, split at blank lines; the number is that of the
    first line of each. Raises UserError for a file that cannot be read."""
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
            try:
                yield start, {"text": part.decode()}
            except UnicodeDecodeError:
                yield start, part  # which `read_row` says
            part = b""


def interpret(record: Any, where: str) -> ChatRow:
    """Return the Row in a record with `messages`, ShareGPT `conversations`, `request` and
    `response` of the OpenAI API, `text`, or `input_ids` and `loss_mask`. Raises ValueError in
    a user's words."""
    if not isinstance(record, dict):
        raise ValueError("is not an object {..}")
    record = {key: value for key, value in record.items() if value is not None}
    _check_read(record, "")
    if "input_ids" in record:
        return _tokens(record, where)
    logged = {"request", "response"} <= record.keys() and not record.keys() & {*CHATS}
    whole = learns(record)
    if logged:
        record = exchange(record["request"], record["response"])
    form = next((key for key in CHATS if record.get(key)), "")
    turns = record.get(form)
    if turns is None and isinstance(record.get("text"), str):
        if not record["text"].strip():
            raise ValueError("text is empty")
        text, passed = _clean(record["text"], "text"), _passed(record, "text")
        return ChatRow(where, None, text, unlearned=NONE if whole else ALL, passed=passed)
    if turns is None:
        keys = ", ".join(sorted(map(str, record)))[:80]
        raise ValueError(
            "has none of messages, conversations, request with response, text; its keys: "
            f"{keys or 'none'}"
        )
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError("its turns are not a list with something in it")
    chat = [_message(turn, i) for i, turn in enumerate(turns)]
    learned = [whole and learns(turn) for turn in turns]
    if system := _system(record, chat):
        chat, learned = [system, *chat], [True, *learned]
    first = next((i for i, m in enumerate(chat) if m["role"] not in FIRST), len(chat))
    body = chat[first:]
    loose = any(m["role"] == "tool" or m.get("tool_calls") for m in body)
    dropped = 0 if loose else _greetings(body)
    chat, body = [*chat[:first], *body[dropped:]], body[dropped:]
    learned = [*learned[:first], *learned[first + dropped :]]
    for i, message in enumerate(body, dropped):
        wanted = ("user", "assistant")[(i - dropped) % 2]
        if message["role"] in FIRST:
            raise ValueError(f"turn {i}: a {message['role']} turn may only stand first")
        if message["role"] != wanted and not loose:
            raise ValueError(f"turn {i}: role {message['role']!r} where {wanted!r} is due")
    if not any(m["role"] == "assistant" for m in chat):
        raise ValueError("has no assistant turn")
    complete = record.get("complete", True) is not False
    said = [on for on, message in zip(learned, chat, strict=True) if message["role"] == "assistant"]
    return ChatRow(
        where,
        chat,
        complete=complete,
        tools=tools_of(record.get("tools")),
        dropped=dropped,
        last_only=logged,
        unlearned=frozenset(i for i, on in enumerate(said) if not on),
        passed=_passed(record, form, *SYSTEM, "tools", "complete"),
    )


def learns(given: Mapping[str, Any]) -> bool:
    """Return whether a row or a turn is to be learned, as far as it says so itself. Raises
    ValueError for a weight between."""
    for key in LEARNED:
        if (value := given.get(key)) is not None and value not in (0, 1):
            raise ValueError(f"its {key} is {value!r:.40}; 0 (not to be learned) and 1 are read")
    return all(given.get(key) in (None, 1) for key in LEARNED)


def _passed(record: Mapping[str, Any], *read: str) -> frozenset[str]:
    """Return the keys of a row, of which `read` were read, that hold something else."""
    known = {*read, *LEARNED, *UNREAD, "line"}  # line: synthesize's own
    return frozenset(key for key in record if key not in known)


def _check_read(given: Mapping[str, Any], what: str) -> None:
    """Raise ValueError for what must not be passed over. what: before the key's name."""
    if held := next((key for key in UNREAD if given.get(key)), ""):
        raise ValueError(f"{what}holds {held}, which training does not read")


def _system(record: Mapping[str, Any], chat: Sequence[Message]) -> Message | None:
    """Return the system turn beside the turns of a row, None for none."""
    text = next((record[key] for key in SYSTEM if record.get(key)), "")
    if not isinstance(text, str):
        raise ValueError(f"its system text is {type(text).__name__}, not text")
    own = chat[0]["content"] if chat[0]["role"] in FIRST else text
    if text and own != text:
        raise ValueError("has a system text beside its turns and another one in them")
    given = text.strip() and chat[0]["role"] not in FIRST
    return {"role": "system", "content": _clean(text, "system")} if given else None


def _tokens(record: Mapping[str, Any], where: str) -> ChatRow:
    """Return the row of tokens that somebody made, supervised where all of its MASKS say so."""
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < 2**31 for t in ids):
        raise ValueError("input_ids are not a list of token ids")
    seen = record.get("attention_mask")
    if isinstance(seen, list) and 0 in seen:
        raise ValueError("its attention_mask hides some of input_ids; write none for padding")
    on = [bool(t) for t in range(len(ids))]  # no token is before the first
    for key in MASKS:
        if (mask := record.get(key)) is not None:
            good = isinstance(mask, list) and len(mask) == len(ids)
            if good and key == "labels":
                mask = [int(t != -100) for t in mask]
            if not good or not all(one in (0, 1) for one in mask):
                raise ValueError(f"{key} is not a list of 0 and 1, one for each of input_ids")
            on = [a and bool(b) for a, b in zip(on, mask, strict=True)]
    prompt = ids[: on.index(True)] if any(on) else ids
    unlearned = NONE if learns({**record, "loss_mask": None}) else ALL
    passed = _passed(record, "input_ids", "attention_mask", *MASKS)
    return ChatRow(where, None, repr(prompt), unlearned=unlearned, passed=passed, ids=ids, loss=on)


def exchange(request: Any, response: Any) -> dict[str, Any]:
    """Return the row of a request and its answer, as servers of the OpenAI API log them. An
    answer that a length or a stop string ended is not complete. Raises ValueError in a
    user's words."""
    request = request if isinstance(request, dict) else {}
    _check_read(request, "its request ")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("its request has no messages")
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ValueError("its response has no choices[0].message")
    if choice.get("finish_reason") == "content_filter" or message.get("refusal"):
        raise ValueError("its answer was filtered, or is a refusal of the server's own")
    answer = {
        k: message[k] for k in (*REASONING, "content", "tool_calls") if message.get(k) is not None
    }
    # vLLM names the stop string that ended an answer; elsewhere a request with some leaves it open.
    named = choice.get("stop_reason", "unknown" if request.get("stop") else None)
    ended = choice.get("finish_reason") in ("stop", "tool_calls", "function_call")
    return {
        "messages": [*messages, {"role": "assistant", **answer}],
        "tools": request.get("tools"),
        "complete": ended and not isinstance(named, str),
    }


def _greetings(body: Sequence[Message]) -> int:
    """Return how many turns stand before the first question though they answer none, as in
    ShareGPT's parts of longer chats; 0 where nothing that can be trained on would be left."""
    roles = [message["role"] for message in body]
    first = roles.index("user") if "user" in roles else 0
    return first if "assistant" in roles[first:] and {*roles[:first]} <= {"assistant"} else 0


def tools_of(given: Any) -> list[Any] | None:
    """Return the functions of a row, None for none."""
    return (spans.objects(given, "tools") or None) if given else None


def _message(turn: Any, i: int) -> Message:
    """Return a turn as the template gets it: its role as transformers calls it, its content
    as text, and every further key that it has."""
    if not isinstance(turn, dict):
        raise ValueError(f"turn {i} is not an object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"turn {i}: unknown role {role!r}")
    _check_read(turn, f"turn {i} ")
    more = {k: v for k, v in turn.items() if k not in OWN and v is not None}
    if more.get("tool_calls"):
        try:
            more["tool_calls"] = spans.arguments(more["tool_calls"])
        except ValueError as error:
            raise ValueError(f"turn {i}: {error}") from None
    else:
        more.pop("tool_calls", None)
    speaks = any(more.get(key) for key in ("tool_calls", *REASONING))
    if isinstance(content, list | tuple):
        content = _joined(content, i)
    if content is None and speaks and ROLES[role] == "assistant":
        return {"role": "assistant", "content": None, **more}
    if not isinstance(content, str):
        raise ValueError(f"turn {i}: content is {type(content).__name__}, not text")
    if not content.strip() and not speaks:
        raise ValueError(f"turn {i}: content is empty")
    return {"role": ROLES[role], "content": _clean(content, f"turn {i}"), **more}


def _joined(parts: list[Any] | tuple[Any, ...], i: int) -> str:
    """Return the text of a list of parts, {"type": "text", "text": ".."} each."""
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        _check_read({str(kind): True}, f"turn {i} ")
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"turn {i}: content holds a part that is {kind!r}, not text")
    return "".join(part["text"] for part in parts)


def _clean(text: str, what: str) -> str:
    if not is_whole(text):
        raise ValueError(f"{what}: holds half of a surrogate pair")
    if "\0" in text:
        raise ValueError(f"{what}: holds a NUL character")
    return text


def encode(
    row: ChatRow, tokenizer: Any, how: RowsConfig, eos: frozenset[int] = NONE
) -> list[Encoded]:
    """Return token ids and loss mask of a row. A plain text may give several windows of
    max_length, a chat with turns=rows one row for each assistant turn. eos: the target's
    end-of-turn tokens.

    Raises BadRow when nothing, or everything, of a chat is supervised or the template shows
    less than the row holds, and UserError without a chat template.
    """
    size = how.max_length
    if row.chat is None and row.unlearned:
        return []
    if row.ids is not None:
        if not any(row.loss[:size]):
            raise BadRow(row.where, f"no supervised token within data.max_length={size} tokens")
        return [Encoded(row.ids[:size], row.loss[:size])]
    if row.chat is None:
        ids = tokenizer(row.text)["input_ids"]  # with BOS, where the target's texts have one
        windows = [ids[i : i + size] for i in range(0, len(ids), size)]
        return [Encoded(w, [False] + [True] * (len(w) - 1)) for w in windows if len(w) > 1]
    if not tokenizer.chat_template:
        raise UserError(
            f"target: its tokenizer has no chat template, which {row.where} needs; take the "
            'instruction-tuned version of the model, or train on plain text ({"text": '
            '".."}, data=text)'
        )
    template = Template(tokenizer, row.tools, dict(how.chat_template_kwargs))
    ends = [i + 1 for i, m in enumerate(row.chat) if m["role"] == "assistant"]
    last_only = how.last_turn_only or row.last_only
    wanted = [end for n, end in enumerate(ends) if n not in row.unlearned]
    if not wanted or (last_only and wanted[-1] != ends[-1]):
        return []
    if how.turns != "rows":
        return [_encode(row, row.chat, template, how.max_length, eos, last_only)]
    found, missed = [], None
    for end in wanted[-1:] if last_only else wanted:
        part = replace(row, complete=row.complete or end != ends[-1])
        try:
            found.append(_encode(part, row.chat[:end], template, how.max_length, eos, True))
        except BadRow as problem:
            missed = problem
    if not found and missed is not None:
        raise missed
    return found


def _encode(
    row: ChatRow,
    chat: Sequence[Message],
    template: Template,
    size: int,
    eos: frozenset[int],
    last_only: bool,
) -> Encoded:
    """Return one row of at most `size` tokens. last_only: the last assistant turn alone is
    supervised."""
    try:
        chat = spans.settled(chat, template)
        if not row.complete and spans.cut_inside(chat, template):
            chat, template = spans.served(chat, template, row.complete)
        ids, masks, hidden = _read(chat, template, eos, last_only, row.complete)
    except ValueError as error:
        raise BadRow(row.where, str(error)) from None
    except Exception as error:  # templates raise jinja errors of many kinds
        reason = f"the chat template refuses it ({first_line(error)})"
        raise BadRow(row.where, reason) from None
    said = 1 if last_only else sum(m["role"] == "assistant" for m in chat)
    if row.unlearned and not last_only:
        if len(masks) != said:
            raise BadRow(
                row.where, "the chat template does not show apart which turns have weight 0"
            )
        masks = [mask for n, mask in enumerate(masks) if n not in row.unlearned]
        said = len(masks)
    if not row.complete and masks and masks[-1] and ids[masks[-1][-1]] in eos:
        masks[-1].pop()  # of an answer that was cut, where the end is the template's word
    shown = [mask for mask in masks if mask]
    if not shown:
        raise BadRow(row.where, "the chat template shows no assistant turn apart from the rest")
    kept = sum(any(t < size for t in mask) for mask in shown)
    on = {t for mask in shown for t in mask if t < size}
    if not on:
        raise BadRow(row.where, f"no supervised token within data.max_length={size} tokens")
    if len(on) == len(ids[:size]):
        raise BadRow(
            row.where, "every token is supervised: the template marks the prompt as the assistant's"
        )
    loss = [t in on for t in range(len(ids[:size]))]
    return Encoded(ids[:size], loss, (said, len(shown), kept), hidden)


def _read(
    chat: Sequence[Message],
    template: Template,
    eos: frozenset[int],
    last_only: bool,
    complete: bool,
) -> tuple[list[int], list[list[int]], int]:
    """Return token ids of a chat, the supervised tokens of its assistant turns (last_only:
    of the last one), and how many of those lack their reasoning. Raises ValueError where
    less is shown than there is."""
    whole = template.render(chat)
    if passed_over := spans.unread(chat, template, whole):
        raise ValueError(f"the chat template does not show {passed_over}")
    ids, turns = _turns(chat, template, whole, eos)
    turns = turns[-1:] if last_only else turns
    places = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    if len(turns) > len(places) or not any(turn.tokens for turn in turns):
        places = []  # tags that are no turns, or nothing that could be checked
    places = places[-len(turns) :]
    hidden = 0
    try:
        for place, turn in zip(places, turns, strict=False):
            if turn.text is not None:
                hidden += spans.check(chat, place, template, turn.begin, turn.text)
    except spans.Unshown as lost:
        mendable = lost.turn == len(chat) - 1 and len(spans.pieces(chat[-1]["content"] or "")) > 1
        if not mendable or isinstance(template, spans.ServedTemplate) or chat[-1].get("tool_calls"):
            raise
        return _read(*spans.served(chat, template, complete), eos, last_only, complete)
    return ids, [turn.tokens for turn in turns], hidden


class Turn(NamedTuple):
    """An assistant turn of a rendering. tokens: the supervised ones, none where the template
    does not show it. text: what they are of the rendering, all of it where the template marks
    turns itself; None where the turn is statistically tied with the rest. begin: the rendering
    before that."""

    tokens: list[int]
    text: str | None = None
    begin: str = ""


def _turns(
    chat: Sequence[Message], template: Template, whole: str, eos: frozenset[int]
) -> tuple[list[int], list[Turn]]:
    """Return token ids of a chat, and its assistant turns in order."""
    if template.tagged:
        ids, mask = template.tags(chat)
        runs: list[list[int]] = []
        for t, on in enumerate(mask):
            if on and (not t or not mask[t - 1]):
                runs.append([])
            if on:
                runs[-1].append(t)
        for run in runs:  # tags may leave the end of the turn out
            behind = run[-1] + 1
            run += [behind] if behind < len(ids) and ids[behind] in eos else []
        return ids, [Turn(_until_end(ids, run, eos), whole) for run in runs]
    found = spans.spans(chat, template, whole)
    out = template.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = out["input_ids"], out["offset_mapping"]
    turns = []
    for span in found:
        tokens = _inside(ids, offsets, whole, span, eos)
        part = (offsets[tokens[0]][0], offsets[tokens[-1]][1]) if tokens else span
        around = (whole[slice(*part)], whole[: part[0]]) if part else ()
        turns.append(Turn(tokens, *around))
    return ids, turns


def _inside(
    ids: list[int],
    offsets: list[tuple[int, int]],
    whole: str,
    span: Span | None,
    eos: frozenset[int],
) -> list[int]:
    """Return the tokens of a span of characters and the end-of-turn token behind it. A
    token that begins with the space before the span, or ends with the blank behind it,
    belongs to it."""
    if span is None:
        return []
    start, end = span
    first = bisect_left(offsets, start, key=lambda pair: pair[1])
    while first < len(offsets) and offsets[first][1] <= start:
        first += 1
    if first < len(offsets) and whole[offsets[first][0] : start].strip(" "):
        first += 1
    last = first
    while last < len(offsets) and offsets[last][0] < end:
        last += 1
    if last > first and whole[end : offsets[last - 1][1]].strip():
        last -= 1
    behind = last
    while behind < len(ids) and ids[behind] not in eos:
        if whole[offsets[behind][0] : offsets[behind][1]].strip():
            behind = len(ids)
        behind += 1
    if last > first and behind < len(ids):
        last = behind + 1
    return _until_end(ids, list(range(first, last)), eos)


def _until_end(ids: list[int], tokens: list[int], eos: frozenset[int]) -> list[int]:
    """Return a turn ends with its first end-of-turn token."""
    for n, t in enumerate(tokens):
        if ids[t] in eos:
            return tokens[: n + 1]
    return tokens
