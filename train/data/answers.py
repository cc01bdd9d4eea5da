"""Whether a rendering shows what an answer says, and answers put as the server had them.

A template renders a chat for the model to go on with, not to be trained on: it may cut the
reasoning out of an answer's text, close a block that the answer left open, or write an empty
one before it. The target would then be trained on a text that it never writes. Every
supervised answer must stand in the rendering as a whole. Where it does not, and the chat ends
with it, the answer itself is put behind the words that asked for it, which is what the target
had before it; otherwise the row is left out.

Some servers keep a model's reasoning apart (`reasoning_content`), others leave it in the text
between delimiters of the model's own (PAIRS).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.train.data.spans import REASONING, Message, Template, unused

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
