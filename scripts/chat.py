"""Talk to the target. Tokens from accepted drafts are coloured; a footer gives accepted length
and tokens/s.

    python scripts/chat.py target=smollm2 drafter=runs/demo/eagle3@chain:2
    echo "What is the capital of France?" | python scripts/chat.py drafter=ngram temperature=0

Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset forgets the conversation. With piped
input every line is a turn.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Run as a file: scripts/ comes first on the path and would shadow libraries.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from outrider.conf.errors import UserError
from outrider.conf.schema import entry
from outrider.decode.engine import Cycle, DecodedRun, Generation, Request, generate
from outrider.decode.models.load import load_target
from outrider.decode.stats import accepted_length, split
from outrider.decode.text import Stream
from outrider.heads.drafters import refuse_other, resolve_drafter
from outrider.scripts.common.config import ChatConfig
from outrider.scripts.common.prompts import chat_ids

DRAFTED = "bright_green"


class AnswerTally:
    """Counts one answer while it streams, so that a stopped answer has a footer too."""

    def __init__(self, prompt: list[int]):
        self.generation = Generation(list(prompt))
        self.began = time.perf_counter()
        self.first = 0.0  # seconds until the first token
        self.last = 0.0

    def add(self, tokens: list[int], drafted: list[bool]) -> None:
        """One call of the engine's `on_tokens`: the first is the prefill's token, each later
        one a cycle.
        """
        out = self.generation
        self.last = time.perf_counter() - self.began
        if not out.token_ids:
            self.first = self.last
        else:
            accepted = sum(drafted)
            out.cycles.append(Cycle(accepted, accepted, False, len(out.token_ids)))
        out.token_ids += tokens
        out.from_draft += drafted

    def footer(self, finished: Generation | None = None, note: str = "") -> str:
        """Return accepted length (over complete cycles, bonus token counted), decoding
        speed, tokens from drafts."""
        out = finished or self.generation
        cycles = split(out)
        mean = accepted_length([cycles.clean + cycles.loop]).mean
        seconds = self.last - self.first
        speed = f"{(len(out.token_ids) - 1) / seconds:.1f}" if seconds > 0 else "-"
        length = "-" if math.isnan(mean) else f"{mean:.2f}"
        parts = [
            f"accepted length {length}",
            f"{speed} tokens/s",
            f"{len(out.token_ids)} tokens",
            f"{sum(out.from_draft)} from accepted drafts",
        ]
        return " · ".join([*parts, note] if note else parts)


class Conversation:
    """One conversation: its messages, the models, and the console it is printed on."""

    def __init__(self, cfg: ChatConfig):
        from rich.console import Console

        self.cfg = cfg
        self.sampling = cfg.sampling()
        refuse_other([cfg.drafter], cfg.target)
        self.target = load_target(cfg.target, cfg.dtype)
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
        if len(ids) >= self.target.context_length:
            raise UserError(
                f"message: {len(ids)} tokens, the target's context holds "
                f"{self.target.context_length}; write a shorter one"
            )
        return ids

    def answer(self, text: str) -> None:
        """Print the answer to one user turn and its footer. Ctrl-C keeps what has been said so
        far.

        Raises UserError for a message that does not fit; the conversation is then as before
        it."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except UserError:
            self.messages.pop()
            raise
        self.number += 1
        stream, tally = Stream(self.target.tokenizer), AnswerTally(prompt)
        said: list[str] = []

        def show(_: int, tokens: list[int], drafted: list[bool]) -> None:
            tally.add(tokens, drafted)
            for token, was_draft in zip(tokens, drafted, strict=True):
                said.append(stream.push(token))
                style = DRAFTED if was_draft else None
                self.console.print(said[-1], style=style, end="", markup=False, emoji=False)

        run: DecodedRun | None = None
        note = ""
        try:
            request = Request(prompt, self.cfg.max_new_tokens, id=self.number)
            how: Any = {"seed": self.cfg.seed, "on_tokens": show}
            run = generate(self.target, self.drafter, [request], self.sampling, **how)
        except KeyboardInterrupt:
            if not self.console.is_terminal:
                raise
            note = "stopped"
        self.messages.append({"role": "assistant", "content": "".join(said).strip()})
        self.console.print()
        self.console.print(tally.footer(run.generations[0] if run else None, note), style="dim")


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
