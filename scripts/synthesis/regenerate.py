"""Many questions to a server at a time, the answers in the questions' order on file.
`scripts/synthesize.py backend=openai` is the command.

A drafter learns the target's own words, so the server must serve the target. What comes back
is text, and training tokenizes it again through the target's chat template. Where that gives
other tokens than the model drew, the row is still the target's text, but not its draw token
for token; `tokens_alike` counts how often the two agree. Reasoning and tool calls that the
server keeps apart stay apart in the row; what is sent back to it is the text alone, as chat
programs do it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.synthesis.ledger import Ledger
from outrider.scripts.synthesis.questions import Questions
from outrider.scripts.synthesis.server import AnswerRefused, GivenUp, OpenAIServer, ServerAnswer
from outrider.train.texts.reasoning import DELIMITERS
from outrider.train.texts.rows import BadRow

AHEAD = 16  # times the concurrency: how many questions may be asked beyond the oldest open one
IN_A_ROW = 8  # questions without an answer, one after the other, that stop the run
HINT = "the same command goes on from here"
SURE = 256  # answers after which a share of cut ones is believed
EVERY = 16  # of the rows beyond that one in so many is read as training does
COMMIT_SECONDS = 1.0  # between two writes to the file


@dataclass
class QuestionFailed:
    """A question without an answer. begun: how many questions were begun when it failed."""

    reason: str
    begun: int


@dataclass
class Regenerator:
    """Asks a server the questions from ledger.settled up to `total` and writes the rows in
    their order.

    body: what every request holds besides messages and seed. share: of the questions that may
        stay without an answer.
    tokenize: text -> ids of the target's tokenizer. specials: texts that would change the
    chat's structure. read: row -> ids of its last answer as training supervises them; raises
    BadRow. max_cut: share of the answers that may be cut. on_row: told the tokens of each
    answered row, 0 for one that failed.
    on_commit: told how many are settled."""

    server: OpenAIServer
    questions: Questions
    ledger: Ledger
    total: int
    concurrency: int
    body: dict[str, Any]
    seed: int
    share: float
    tokenize: Callable[[str], list[int]]
    specials: tuple[str, ...] = ()
    read: Callable[[dict[str, Any]], list[int]] | None = None
    max_cut: float = 1.0
    on_row: Callable[[int], None] = lambda tokens: None
    on_commit: Callable[[int], None] = lambda settled: None
    tokens_alike: Counter[bool] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    _begun: int = 0
    _proved: int = 0  # the last begun question that was answered
    _in_a_row: int = 0
    _failures: int = 0

    def __post_init__(self) -> None:
        self.tally = Counter(self.ledger.tally)  # with the answers that are not on file yet

    async def run(self) -> None:
        """Ask until all are settled. Raises UserError when too many fail. Whatever ends it,
        the answers without a gap before them are on file."""
        self._done: dict[int, dict[str, Any] | QuestionFailed] = {}
        self._next = self.ledger.settled  # the oldest question that is still open
        self._todo = iter(range(self.ledger.settled, self.total))
        self._moved = asyncio.Event()
        self._failures = len(self.ledger.failed) + len(self.questions.bad)
        self.check_cut(SURE)
        finished = False
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work()) for _ in range(self.concurrency)]
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
                f"base_url: no answer to {self._where(at)} ({reason}) and what follows it; look at "
                f"the server, {HINT}"
            )

    def _where(self, n: int) -> str:
        """The file and line of a question."""
        return f"{self.questions.path}:{self.questions.lines[n]}"

    async def _work(self) -> None:
        for n in self._todo:
            while n >= self._next + AHEAD * self.concurrency:
                self._moved.clear()
                await self._moved.wait()
            self._begun = mine = self._begun + 1
            try:
                row, tokens = await self._converse(n)
                self._done[n] = row
                self.tally.update(tally_of(row))
                self.check_cut(SURE)
                self.answered, self._in_a_row = self.answered + 1, 0
                self._proved = max(self._proved, mine)
                self.on_row(tokens)
            except (AnswerRefused, GivenUp) as error:
                self._fail(n, error)
            while self._next in self._done:
                self._next += 1
                self._moved.set()

    def _fail(self, n: int, error: Exception) -> None:
        where = self._where(n)
        self._failures, self._in_a_row = self._failures + 1, self._in_a_row + 1
        if self._in_a_row >= IN_A_ROW and (isinstance(error, GivenUp) or not self.answered):
            raise UserError(
                f"base_url: {self._in_a_row} questions in a row without an answer, the last "
                f"{where} ({error}); look at the server, {HINT}"
            ) from None
        of = self.total + len(self.questions.bad)
        if self._failures > self.share * of:
            raise UserError(
                f"{where}: {error}; {self._failures} of {of} questions have no answer, above "
                f"max_failed={self.share:g}; look at the server or raise it, {HINT}"
            ) from None
        self._done[n] = QuestionFailed(str(error), self._begun)
        self.on_row(0)

    def cut(self) -> str:
        """How many answers were cut, of all that were given."""
        cut, answers = self.tally["cut"], self.tally["answers"]
        return f"{cut} of {answers} answers were cut at max_new_tokens={self.body['max_tokens']}"

    def check_cut(self, least: int = 1) -> None:
        """Raises UserError where there are `least` answers and too many of them were cut."""
        answers = self.tally["answers"]
        if answers < least or self.tally["cut"] <= self.max_cut * answers:
            return
        raise UserError(
            f"max_cut: {self.cut()}, above {self.max_cut:g}; give more tokens and another out, or "
            f"raise max_cut: {self.ledger.path} keeps its rows, and {HINT}"
        )

    async def _converse(self, n: int) -> tuple[dict[str, Any], int]:
        """The row of question n and its tokens. An answer that was cut ends its conversation:
        what the user said next was said to a whole one, and no end-of-turn token stands
        between. So does a tool call, whose result nobody has."""
        turns, tools = self.questions[n]
        tools = tools or self.body.get("tools")
        body = {**self.body, **({"tools": tools} if tools else {})}
        kept: list[dict[str, Any]] = []
        sent: list[dict[str, Any]] = []
        tokens, answer = 0, None
        for message in turns:
            kept.append(message)
            sent.append(message)
            if message["role"] == "system":
                continue
            digest = hashlib.sha256(repr((self.seed, n, len(kept))).encode()).digest()
            seed = int.from_bytes(digest[:4]) >> 1
            answer = await self.server.chat({**body, "messages": sent, "seed": seed})
            kept.append(self._message(answer))
            sent.append({"role": "assistant", "content": kept[-1]["content"]})
            tokens += self._count(answer)
            if not answer.finished or answer.calls:
                break
        row: dict[str, Any] = {"messages": kept}
        row["complete"] = answer is not None and answer.finished
        if tools:
            row["tools"] = tools
        if answer is not None and (self.answered < SURE or n % EVERY == 0):
            self._read(row, answer)
        return row, tokens

    def _message(self, answer: ServerAnswer) -> dict[str, Any]:
        """An answer as a turn of a row. Raises Refused for one that would change the chat."""
        text, thought = answer.text.strip(), answer.reasoning.strip()
        said = f"{text}{thought}{json.dumps(answer.calls, ensure_ascii=False)}"
        if any(s in said for s in self.specials):
            raise AnswerRefused("the answer holds a control token of the target's template")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if answer.calls:
            message |= {"content": text or None, "tool_calls": answer.calls}
        return message

    def _count(self, answer: ServerAnswer) -> int:
        """Tokens of an answer, and whether the target's tokenizer makes the same of its text.
        Of an answer that is more than text `_read` says it."""
        if more_than_text(answer):
            return max(answer.tokens, 0) or len(self.tokenize(answer.text + answer.reasoning))
        here = self.tokenize(answer.text)
        self._compare(answer, here)
        return max(answer.tokens, 0) or len(here)

    def _compare(self, answer: ServerAnswer, here: list[int]) -> None:
        """Whether ids that were made here are the server's: the same ids where it told them,
        else as many as it counted (the end-of-turn token may be among them)."""
        if (there := answer.token_ids) is not None:
            self.tokens_alike[there[: len(here)] == here and len(there) - len(here) in (0, 1)] += 1
        elif answer.tokens >= 0:
            self.tokens_alike[answer.tokens - len(here) in (0, 1)] += 1

    def _read(self, row: dict[str, Any], answer: ServerAnswer) -> None:
        """Read a row as training does: whether it can be used, and, where the last answer is
        more than text, whether what would be supervised are the server's tokens."""
        if self.read is None:
            return
        try:
            here = self.read(row)
        except BadRow as problem:
            self.unusable[problem.reason] += 1
            return
        if more_than_text(answer):
            self._compare(answer, here)

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
            for row in rows:
                self.ledger.tally.update(tally_of(row))
            self.ledger.append(rows, at - self.ledger.settled, failed, goes_on=True)
            self.on_commit(at)


def more_than_text(answer: ServerAnswer) -> bool:
    """Whether the template has a part in an answer: reasoning or tool calls."""
    return bool(answer.reasoning or answer.calls or DELIMITERS.search(answer.text))


def tally_of(row: dict[str, Any]) -> dict[str, int]:
    """What is counted of a row: its answers, and whether the last one was cut."""
    answers = sum(message["role"] == "assistant" for message in row["messages"])
    return {"answers": answers, "cut": int(not row["complete"])}
