"""Many questions to a server at a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.scripts.data.answering import SURE, Answering
from outrider.scripts.data.questions import Question
from outrider.scripts.data.server import AnswerRefused, GivenUp, OpenAIServer, read_answer


@dataclass(kw_only=True)
class Regenerator(Answering):
    """A server answers. model: its name there."""

    server: OpenAIServer
    model: str = ""

    async def run(self) -> None:
        """Have all of them answered, each row on file as soon as it is whole. Raises UserError
        when too many fail or are cut."""
        self.check_cut(SURE)
        todo = iter(self.missing)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.cfg.concurrency):
                    group.create_task(self._work(todo))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self, todo: Iterator[int]) -> None:
        for n in todo:
            try:
                self.append([await self._row(n)])
            except (AnswerRefused, GivenUp) as error:
                self.fail(n, error)
            self.check_cut(SURE)

    async def _row(self, n: int) -> dict[str, Any]:
        """Return the row of question n."""
        talk, answer = self.converse(n), None
        try:
            while True:
                body = self._body(n, talk.send(answer))  # type: ignore[arg-type]
                answer = await self.server.ask("POST", "/chat/completions", body, read_answer)
                self.tokens += max(answer.tokens, 0) or len(answer.text + answer.reasoning) // 4
        except StopIteration as end:
            return dict(end.value)

    def _body(self, n: int, asked: Question) -> dict[str, Any]:
        """Return a request; its seed is its own."""
        messages, tools = asked
        digest = hashlib.sha256(repr((self.cfg.seed, n, len(messages))).encode()).digest()
        return {
            "model": self.model,
            "max_tokens": self.cfg.longest,
            "temperature": self.cfg.answer_temperature,
            "top_p": self.cfg.answer_top_p,
            "stream": False,
            **({"return_token_ids": True} if self.cfg.tokens else {}),
            **self.cfg.extra_body,
            **({"tools": tools} if tools else {}),
            "messages": messages,
            "seed": int.from_bytes(digest[:4]) >> 1,
        }
