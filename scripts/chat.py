"""Talk to the target. Tokens from accepted drafts are coloured; a footer gives accepted length
and tokens/s.

    outrider chat target=smollm2 drafter=runs/demo/eagle3@chain:2
    echo "What is the capital of France?" | outrider chat drafter=ngram temperature=0

Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset forgets the conversation. With piped
input every line is a turn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.heads.drafters import refuse_other, resolve_drafter
from outrider.scripts.api import Answer, generate
from outrider.scripts.common.config import ChatConfig
from outrider.scripts.common.prompts import chat_ids

DRAFTED = "bright_green"


def footer(answer: Answer, note: str = "") -> str:
    """Return accepted length (bonus token counted), speed, and tokens from drafts."""
    mean, speed = answer.accepted_length, answer.tokens_per_second
    parts = [
        "accepted length " + ("-" if math.isnan(mean) else f"{mean:.2f}"),
        "-" if math.isnan(speed) else f"{speed:.1f} tokens/s",
        f"{len(answer.token_ids)} tokens",
        f"{sum(answer.from_draft)} from accepted drafts",
    ]
    return " · ".join([*parts, note] if note else parts)


class Conversation:
    """One conversation: its messages, the models, and the console it is printed on."""

    def __init__(self, cfg: ChatConfig):
        from rich.console import Console

        self.cfg = cfg
        refuse_other([cfg.drafter], cfg.target)
        self.target = load_target(cfg.target, cfg.dtype, cfg.device)
        self.drafter = resolve_drafter(cfg.drafter, self.target)
        self.console = Console(highlight=False, soft_wrap=True)
        self.number = 0
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages = [{"role": "system", "content": self.cfg.system}] if self.cfg.system else []

    def _prompt(self) -> list[int]:
        """Return ids of the conversation; the oldest turns leave when the context would be
        exceeded."""
        tokenizer = self.target.tokenizer
        room = self.target.context_length - self.cfg.max_new_tokens
        fixed = 1 if self.cfg.system else 0
        ids = chat_ids(tokenizer, self.messages)
        while len(ids) > room and len(self.messages) > fixed + 1:
            del self.messages[fixed : fixed + 2]
            ids = chat_ids(tokenizer, self.messages)
        return ids

    def answer(self, text: str) -> None:
        """Print the answer to one user turn and its footer. Ctrl-C keeps what has been said so
        far.

        Raises UserError for a message that does not fit; the conversation is then as before
        it."""
        cfg = self.cfg
        self.messages.append({"role": "user", "content": text})
        self.number += 1
        keys = {key: getattr(cfg, key) for key in ("temperature", "top_k", "top_p", "min_p")}
        seed, longest = cfg.seed << 32 | self.number, cfg.max_new_tokens
        try:
            answer = generate(self.target, self._prompt(), self.drafter, longest, seed, **keys)
        except UserError:
            self.messages.pop()
            raise
        note = ""
        try:
            for piece in answer:
                style = DRAFTED if piece.drafted else None
                self.console.print(piece.text, style=style, end="", markup=False, emoji=False)
        except KeyboardInterrupt:
            if not self.console.is_terminal:
                raise
            answer.stop()
            note = "stopped"
        self.messages.append({"role": "assistant", "content": answer.text.strip()})
        self.console.print()
        self.console.print(footer(answer, note), style="dim")


def _turns(chat: Conversation) -> Iterator[str]:
    """User turns: from the terminal with a prompt, or line by line from a pipe; ends at end of
    input or /exit.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        chat.console.print(
            f"{chat.target.identity.name} with {chat.cfg.drafter}: "
            "Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset forgets",
            style="dim",
        )
    while True:
        try:
            line = chat.console.input("[bold]> [/bold]") if interactive else input()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UserError(
                f"message: standard input is no {error.encoding} text; convert it"
            ) from None
        except KeyboardInterrupt:
            if not interactive:
                raise
            chat.console.print("\nCtrl-D or /exit leaves", style="dim")
            continue
        line = line.strip()
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            chat.reset()
        elif line:
            yield line


@entry("chat", ChatConfig)
def main(cfg: ChatConfig) -> Any:
    """Command-line entry."""
    chat = Conversation(cfg)
    for line in _turns(chat):
        try:
            chat.answer(line)
        except UserError as e:
            if not sys.stdin.isatty():
                raise
            chat.console.print(f"error: {e}", style="red", markup=False)


if __name__ == "__main__":
    main()
