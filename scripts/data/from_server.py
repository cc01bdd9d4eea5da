"""Many questions to a server at a time, the answers in the questions' order on file."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.data.conversation import HINT, SURE, Answering
from outrider.scripts.data.server import AnswerRefused, GivenUp, OpenAIServer

AHEAD = 16  # times the concurrency: how many questions may be asked beyond the oldest open one
IN_A_ROW = 8  # questions without an answer, one after the other, that stop the run
COMMIT_SECONDS = 1.0  # between two writes to the file


@dataclass
class QuestionFailed:
    """A question without an answer. begun: how many questions were begun when it failed."""

    reason: str
    begun: int


@dataclass(kw_only=True)
class Regenerator(Answering):
    """A server answers. model: its name there."""

    server: OpenAIServer
    model: str = ""
    _begun: int = 0
    _proved: int = 0  # the last begun question that was answered
    _in_a_row: int = 0

    async def run(self) -> None:
        """Have all of them answered. Raises UserError when too many fail or are cut. Whatever ends
        it, the answers without a gap before them are on file."""
        self._done: dict[int, dict[str, Any] | QuestionFailed] = {}
        self._next = self.ledger.settled  # the oldest question that is still open
        self._todo = iter(range(self.ledger.settled, self.total))
        self._moved = asyncio.Event()
        self.check_cut(SURE)
        finished = False
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work()) for _ in range(self.cfg.concurrency)]
                while (await asyncio.wait(workers, timeout=COMMIT_SECONDS))[1]:
                    self._commit(False)
            finished = await self.server.alive()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._commit(finished)
        at = self.ledger.settled
        if at < self.total:  # all that was left failed, and nothing else was answered
            left = self._done[at]
            reason = left.reason if isinstance(left, QuestionFailed) else ""
            raise UserError(
                f"base_url: no answer to {self.where(at)} ({reason}) and what follows it; look at "
                f"the server, {HINT}"
            )

    async def _work(self) -> None:
        for n in self._todo:
            while n >= self._next + AHEAD * self.cfg.concurrency:
                self._moved.clear()
                await self._moved.wait()
            self._begun = mine = self._begun + 1
            try:
                self._done[n] = await self._ask(n)
                self.check_cut(SURE)
                self._in_a_row = 0
                self._proved = max(self._proved, mine)
            except (AnswerRefused, GivenUp) as error:
                self.fail(n, error)
            while self._next in self._done:
                self._next += 1
                self._moved.set()

    async def _ask(self, n: int) -> dict[str, Any]:
        """The row of question n."""
        talk, answer, tokens = self.converse(n), None, 0
        try:
            while True:
                turn = talk.send(answer)  # type: ignore[arg-type]
                answer = await self.server.chat(self._body(n, *turn))
                tokens += self.tokens_of(answer)
        except StopIteration as end:
            self.on_tokens(tokens)
            row: dict[str, Any] = end.value
            return row

    def _body(
        self, n: int, messages: list[dict[str, Any]], tools: list[Any] | None, turn: int
    ) -> dict[str, Any]:
        """A request; its seed is its own."""
        digest = hashlib.sha256(repr((self.cfg.seed, n, turn)).encode()).digest()
        return {
            "model": self.model,
            "max_tokens": self.cfg.longest,
            "temperature": self.cfg.answer_temperature,
            "top_p": self.cfg.answer_top_p,
            "stream": False,
            **self.cfg.extra_body,
            **({"tools": tools} if tools else {}),
            "messages": messages,
            "seed": int.from_bytes(digest[:4]) >> 1,
        }

    def fail(self, n: int, error: Exception) -> None:
        """See Answering; many in a row are the server's fault."""
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW and (isinstance(error, GivenUp) or not self.answered):
            raise UserError(
                f"base_url: {self._in_a_row} questions in a row without an answer, the last "
                f"{self.where(n)} ({error}); look at the server, {HINT}"
            ) from None
        super().fail(n, error)
        self._done[n] = QuestionFailed(str(error), self._begun)

    def _commit(self, finished: bool) -> None:
        """Write what is settled without a gap. A failure counts as settled once a question
        that was begun after it was answered, or at the end if the server still speaks: until
        then it may be the server's fault, and a second run should ask again."""
        rows: list[dict[str, Any]] = []
        failed: list[list[Any]] = []
        at = self.ledger.settled
        while (found := self._done.get(at)) is not None:
            if not isinstance(found, QuestionFailed):
                rows.append(found)
            elif found.begun < self._proved or (finished and (self.answered or self.ledger.rows)):
                failed.append([self.questions.lines[at], found.reason])
            else:
                break
            del self._done[at]
            at += 1
        if at > self.ledger.settled:
            self.append(rows, at - self.ledger.settled, failed)
