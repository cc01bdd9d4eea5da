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
import re
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


def objects(given: Any, what: str) -> list[Any]:
    """Return a list of objects; data sets keep it as such or as its JSON text. what: it is.
    Raises ValueError for anything else."""
    if isinstance(given, str):
        try:
            given = inner(given)
        except ValueError:
            raise ValueError(f"{what} are neither a list nor its JSON text") from None
    if not isinstance(given, list | tuple) or not all(isinstance(one, dict) for one in given):
        raise ValueError(f"{what} are not a list of objects")
    return list(given)


def arguments(calls: Any) -> list[Any]:
    """Tool calls with their arguments as objects, as engines hand them to templates: the API
    keeps them as JSON text. Raises ValueError for what is no list of calls."""
    try:
        found = copy.deepcopy(objects(calls, "tool_calls"))
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


# Whether a rendering shows what an answer says, and answers put as the server had them.
#
# A template renders a chat for the model to go on with, not to be trained on: it may cut the
# reasoning out of an answer's text, close a block that the answer left open, or write an empty
# one before it. The target would then be trained on a text that it never writes. Every
# supervised answer must stand in the rendering as a whole. Where it does not, and the chat
# ends with it, the answer itself is put behind the words that asked for it, which is what the
# target had before it; otherwise the row is left out.
#
# Some servers keep a model's reasoning apart (`reasoning_content`), others leave it in the
# text between delimiters of the model's own (PAIRS).
# -------------------------------------------------------------------------------------------

PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
OPENING, CLOSING = zip(*PAIRS, strict=True)
DELIMITERS = re.compile("|".join(re.escape(word) for pair in PAIRS for word in pair))


class Unshown(ValueError):
    """The rendering does not show an answer as the target wrote it. turn: which one."""

    def __init__(self, reason: str, turn: int) -> None:
        super().__init__(reason)
        self.turn = turn


@dataclass
class ServedTemplate(Template):
    """The template of a chat whose last turn is what the target wrote behind the words that
    ask for it. length: turns of that chat; shorter ones are the template's own. tail: what the
    template writes behind the last turn, "" behind an answer that was cut."""

    length: int = 0
    tail: str = ""

    @property
    def tagged(self) -> bool:
        """Never: what the template marks is not what is here."""
        return False

    def render(self, chat: Sequence[Message], ask: bool = False) -> str:
        """As Template.render."""
        if ask or len(chat) != self.length:
            return super().render(chat, ask)
        return f"{super().render(chat[:-1], True)}{chat[-1]['content']}{self.tail}"


def cut_inside(chat: Sequence[Message], template: Template) -> bool:
    """Return whether the last answer, which was cut, has not ended its reasoning: no
    template can show that. An answer that names no delimiter is inside where the words that
    ask open the block."""
    last = chat[-1]
    content = last.get("content") or ""
    if last["role"] != "assistant" or last.get("tool_calls"):
        return False
    if thought(last):
        return not content.strip()
    if any(word in content for word in CLOSING):
        return False
    return stays_open(content) or asks_inside(template.render(chat[:-1], True))


def served(
    chat: Sequence[Message], template: Template, complete: bool
) -> tuple[list[Message], ServedTemplate]:
    """Return the chat with its last answer as the target wrote it, and the template that
    shows that. Raises ValueError where it cannot stand behind the words that ask for it."""
    *before, last = chat
    turn, word = len(before), unused(template.render(chat))
    ask, text = template.render(before, True), last.get("content") or ""
    if apart := thought(last):
        key = next(key for key in REASONING if last.get(key) == apart)
        opening = ""
        if not asks_inside(ask):
            begin, found, _ = template.render([*before, {**last, key: word}]).partition(word)
            if not found or not begin.startswith(ask):
                raise ValueError(f"the chat template does not show the {key} of turn {turn}")
            opening = begin.removeprefix(ask)
        text = opening + apart.lstrip()
    elif ends_closed(ask):
        raise ValueError(
            f"turn {turn} holds reasoning, but the words that ask for it close its block at once; "
            "set data.chat_template_kwargs as the server had it"
        )
    plain = {"role": "assistant", "content": word}
    tail = template.render([*before, plain]).partition(word)[2] if complete else ""
    kept = [*before, {"role": "assistant", "content": behind(ask, text)}]
    return kept, ServedTemplate(
        template.tokenizer, template.tools, template.kwargs, len(chat), tail
    )


def check(chat: Sequence[Message], turn: int, template: Template, begin: str, text: str) -> int:
    """Return whether `text`, the rendering of a supervised turn, shows all that the target
    wrote in it, whatever the blanks; of an earlier turn's reasoning alone, how much is cut
    off: 1 or 0.

    begin: the rendering before `text`. Raises Unshown, or ValueError for an answer that no
    rendering can mend.
    """
    message = chat[turn]
    content = message.get("content") or ""
    *inner, answer = pieces(content)
    inner.append("".join(thought(message).split()))
    shown = "".join(text.split())
    last = turn == len(chat) - 1
    if answer not in shown or (last and any(part not in shown for part in inner)):
        raise Unshown(
            f"the chat template does not show all of turn {turn} in tokens of its own", turn
        )
    if stays_open(content):
        ask = template.render(chat[:turn], True)
        own = behind(ask, content).strip()
        whole = begin + text
        if not whole.startswith(ask) or not whole[len(ask) :].lstrip().startswith(own):
            raise ValueError(f"turn {turn} opens a block of reasoning and does not close it")
    elif text.lstrip().startswith(OPENING) and ends_closed(begin):
        raise Unshown(
            f"the chat template writes a block of reasoning of its own before that of turn {turn}",
            turn,
        )
    return int(any(part not in shown for part in inner))


def thought(message: Message) -> str:
    """Return the reasoning that a turn keeps apart from its text, "" for none."""
    found = (message.get(key) for key in REASONING)
    return next((text for text in found if isinstance(text, str) and text.strip()), "")


def stays_open(text: str) -> bool:
    """Return whether a text begins with a block that it does not close."""
    start = text.lstrip()
    return any(start.startswith(first) and last not in text for first, last in PAIRS)


def asks_inside(prompt: str) -> bool:
    """Return whether the words that ask for an answer open a block: the answer begins
    inside it."""
    return prompt.rstrip().endswith(OPENING)


def ends_closed(text: str) -> bool:
    """Return whether a block ends where a text does."""
    return text.rstrip().endswith(CLOSING)


def behind(prompt: str, answer: str) -> str:
    """Return an answer as it is behind the words that asked for it: without the opening
    that is theirs already."""
    text = answer.lstrip()
    first = next((word for word in OPENING if text.startswith(word)), "")
    if not first or not prompt.rstrip().endswith(first):
        return answer
    rest = text.removeprefix(first)
    return rest.lstrip() if prompt[-1:].isspace() else rest


def pieces(text: str) -> list[str]:
    """Return the parts of a text between delimiters, blanks taken out; the last one is what
    is behind all reasoning, "" where nothing does."""
    return ["".join(part.split()) for part in DELIMITERS.split(text)]
