"""The chat behind a completion's prompt: who calls `/completions` often renders the target's
chat template himself."""

from __future__ import annotations

from typing import Any

MARKS = ("\u241fa\u241f", "\u241fb\u241f", "\u241fc\u241f", "\u241fd\u241f")


class Renderings:
    """Reads chats back from prompts that the template of a tokenizer made."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos = getattr(tokenizer, "bos_token", None) or ""
        self.starts: list[tuple[str, str, str]] = []  # before and behind a system text, ..
        system, requested, said, again = MARKS
        turns = [
            {"role": "user", "content": requested},
            {"role": "assistant", "content": said},
            {"role": "user", "content": again},
        ]
        with_system = self._pieces([{"role": "system", "content": system}, *turns], MARKS)
        without = self._pieces(turns, MARKS[1:])
        if without:
            before, self.answer, self.next, self.end = without
            self.starts.append(("", before, ""))
        if with_system and without:
            self.starts.insert(0, (with_system[0], with_system[1], "system"))

    def _render(self, chat: list[dict[str, str]]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # templates raise jinja errors of many kinds
            return ""
        return str(text)

    def _pieces(self, chat: list[dict[str, str]], marks: tuple[str, ...]) -> list[str]:
        """The template's own text around the marks; [] where it does not show each once."""
        if not getattr(self.tokenizer, "chat_template", None):
            return []
        rest, pieces = self._render(chat), []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                return []
            pieces.append(before)
        return [*pieces, rest]

    def chat(self, prompt: str | list[int]) -> list[dict[str, str]]:
        """The messages of a prompt; [] where it is no rendering of this template."""
        if isinstance(prompt, list):
            if not all(0 <= i < len(self.tokenizer) for i in prompt):
                return []
            prompt = self.tokenizer.decode(prompt, skip_special_tokens=False)
        text = str(prompt)
        for first, second, role in self.starts:
            for begun in (text, self.bos + text):
                chat = self._split(begun, first, second, role)
                if chat and self._render(chat) == begun:
                    return chat
        return []

    def _split(self, text: str, first: str, second: str, role: str) -> list[dict[str, str]]:
        chat: list[dict[str, str]] = []
        if role:
            if not text.startswith(first):
                return []
            system, found, text = text[len(first) :].partition(second)
            if not found:
                return []
            chat.append({"role": "system", "content": system})
        elif text.startswith(second):
            text = text[len(second) :]
        else:
            return []
        while True:
            requested, found, text = text.partition(self.answer)
            if not found:
                return []
            chat.append({"role": "user", "content": requested})
            if not text:
                return chat
            said, found, text = text.partition(self.next)
            if not found:
                return []
            chat.append({"role": "assistant", "content": said})
