"""Which characters of a rendered chat are the assistant's: one span for each of its turns.

A chat template may treat turns differently (the last one alone gets a think block, earlier
reasoning is dropped, the system's text goes into the last question), so the text up to a turn
need not be a prefix of the whole. Spans are therefore found in the whole rendering: a turn is
replaced by a word that occurs nowhere else and the chat is rendered again. What is before
and behind that word is the template's; in the whole rendering the turn is between the two.
Answers themselves are never searched for.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.conf.jsonl import inner

REASONING = ("reasoning_content", "reasoning", "thinking")  # names that templates know
KNOWN_BY_SOME = ("developer", "tool")  # roles that a template may pass over
Message = dict[str, Any]
Span = tuple[int, int]


@dataclass
class Template:
    """The chat template of a tokenizer, with what a row and the configuration hand to it.

    tools: the functions that the row offers, None for none. kwargs: further arguments of the
    template (data.chat_template_kwargs).
    """

    tokenizer: Any
    tools: list[Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tagged(self) -> bool:
        """Whether the template marks the assistant's text itself."""
        text = self.tokenizer.chat_template or ""
        return "{% generation" in text or "{%- generation" in text

    def render(self, chat: Sequence[Message], ask: bool = False) -> str:
        """Return the chat as text. ask: with the words that ask for an answer behind it."""
        return str(
            self.tokenizer.apply_chat_template(
                list(chat),
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=ask,
                **self.kwargs,
            )
        )

    def tags(self, chat: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return token ids, and which of them the template's own tags mark."""
        out = self.tokenizer.apply_chat_template(
            list(chat),
            tools=self.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.kwargs,
        )
        return list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]


def spans(chat: Sequence[Message], template: Template, whole: str) -> list[Span | None]:
    """Start and end of every assistant turn in `whole`, the rendering of `chat`; None where
    the template does not render a turn, or not so that it can be told from the rest.

    A turn of text alone spans its text. A turn with reasoning or tool calls spans all that the
    template writes for it: their delimiters are the target's own words.
    """
    word = f"answer{hashlib.sha256(whole.encode(errors='replace')).hexdigest()[:24]}"
    return [
        _span(chat, i, template, whole, word)
        for i, message in enumerate(chat)
        if message["role"] == "assistant"
    ]


def _span(
    chat: Sequence[Message], i: int, template: Template, whole: str, word: str
) -> Span | None:
    plain = {"role": "assistant", "content": word}
    try:
        before, *more = template.render([*chat[:i], plain, *chat[i + 1 :]]).split(word)
    except Exception:  # a template may ask for the tool calls that a later turn answers
        return _prefix_span(chat, i, template, whole)
    if len(more) == 1 and whole.endswith(more[0]):
        end = len(whole) - len(more[0])
        if whole.startswith(before) and len(before) <= end:
            return len(before), end
        # The template writes something else before this turn than before a plain one: the turn
        # begins where the target was asked for it.
        begin = len(before) - _behind_asking(chat, i, template, word)
        if 0 <= begin <= end and whole.startswith(before[:begin]):
            return begin, end
    return _prefix_span(chat, i, template, whole)


def _behind_asking(chat: Sequence[Message], i: int, template: Template, word: str) -> int:
    """Return how many characters the template writes between the words that ask for turn i
    and a turn of text alone; more than there are where it cannot be told."""
    nowhere = 1 << 62
    if not i:
        return nowhere
    plain, question = {"role": "assistant", "content": word}, f"question{word}"
    marked = [*chat[: i - 1], {**chat[i - 1], "content": question}, plain, *chat[i + 1 :]]
    try:
        without, requested = template.render(chat[:i]), template.render(chat[:i], True)
        _, between = template.render(marked).split(question)
    except Exception:
        return nowhere
    gap, words = between.split(word)[0], requested[len(without) :]
    place = gap.rfind(words) if words and requested.startswith(without) else -1
    return len(gap) - place - len(words) if place >= 0 else nowhere


def _prefix_span(chat: Sequence[Message], i: int, template: Template, whole: str) -> Span | None:
    """Return the span of a turn up to which the chat is a prefix of the whole."""
    try:
        before, after = template.render(chat[:i], True), template.render(chat[: i + 1])
    except Exception:
        return None
    if after.startswith(before) and whole.startswith(after):
        return len(before), len(after)
    return None


def unread(chat: Sequence[Message], template: Template, whole: str) -> str:
    """Return what of a chat its rendering does not show though it must, "" if nothing: a
    template passes over what it does not know, and the target would be trained on a text
    that it never writes.

    Looked at: tools, tool calls, the reasoning of the last turn, and turns of the roles that
    not every template knows.
    """

    def same(changed: Sequence[Message], tools: list[Any] | None) -> bool:
        try:
            return replace(template, tools=tools).render(changed) == whole
        except Exception:
            return False

    if template.tools and same(chat, None):
        return "tools"
    last = max(i for i, message in enumerate(chat) if message["role"] == "assistant")
    for i, message in enumerate(chat):
        for key in ("tool_calls", *(REASONING if i == last else ())):
            without = {k: v for k, v in message.items() if k != key}
            if message.get(key) and same([*chat[:i], without, *chat[i + 1 :]], template.tools):
                return f"the {key} of turn {i}"
        other = {**message, "content": f"{message['content']} {unused(whole)}"}
        if message["role"] in KNOWN_BY_SOME and same(
            [*chat[:i], other, *chat[i + 1 :]], template.tools
        ):
            return f"turn {i}, role {message['role']!r}"
    return ""


def unused(text: str) -> str:
    """Return a word that does not occur in a text."""
    return f"other{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:24]}"


def settled(chat: Sequence[Message], template: Template) -> list[Message]:
    """Return the chat with `content: null` as the template wants it: left as it is, or the
    empty text where the template would print the word None."""
    found = [copy.copy(message) for message in chat]
    for message in found:
        if message.get("content") is None:
            left = _printed(found, template)
            message["content"] = "None"
            if left in (None, _printed(found, template)):
                message["content"] = ""
            else:
                message["content"] = None
    return found


def _printed(chat: Sequence[Message], template: Template) -> str | None:
    """Return the rendering, None where the template refuses the chat."""
    try:
        return template.render(chat)
    except Exception:  # jinja errors of many kinds
        return None


def arguments(calls: Any) -> list[Any]:
    """Tool calls with their arguments as objects, as engines hand them to templates: the API
    keeps them as JSON text. Raises ValueError for what is no list of calls."""
    if isinstance(calls, str):
        calls = inner(calls)
    if not isinstance(calls, list | tuple) or not all(isinstance(c, dict) for c in calls):
        raise ValueError("tool_calls are not a list of objects")
    try:
        found = copy.deepcopy(list(calls))
    except RecursionError:
        raise ValueError("tool_calls are nested too deeply") from None
    for call in found:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call has no function name")
        given = function.get("arguments")
        if isinstance(given, str):
            try:
                value = inner(given)
            except ValueError:
                continue
            if isinstance(value, dict):
                function["arguments"] = value
    return found
