"""Questions and their answers, whoever asks and answers: what a row holds, what is counted, and
when a run stops.

A drafter learns the target's own words, so the target must answer. What a row holds is text, and
training tokenizes it again through the target's chat template. Where that gives other tokens
than the model drew, the row is still the target's text, but not its draw token for token;
`tokens_alike` counts how often the two agree. Reasoning and tool calls that a server keeps apart
stay apart in the row; what is sent back to it is the text alone, as chat programs do it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.conf.errors import UserError
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.ledger import Ledger
from outrider.scripts.data.questions import Invented, Questions
from outrider.scripts.data.server import AnswerRefused, ServerAnswer
from outrider.train.data.reasoning import DELIMITERS
from outrider.train.data.rows import BadRow, RowReading, encode, interpret

HINT = "the same command goes on from here"
SURE = 256  # answers after which a share of cut ones is believed
EVERY = 16  # of the rows beyond that one in so many is read as training does


class Turn(NamedTuple):
    """What waits for an answer. turn: place of the answer in its row."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    turn: int


@dataclass
class Answering:
    """Questions from ledger.settled up to `total`, whose rows are written in their order. A
    subclass's `run` has them answered; it raises UserError when too many fail or are cut.

    tokenizer: the target's. on_tokens: told the tokens of answers. on_commit: told how many are
    settled."""

    cfg: SynthesizeConfig
    questions: Questions | Invented
    ledger: Ledger
    total: int
    tokenizer: Any
    on_tokens: Callable[[int], None] = lambda tokens: None
    on_commit: Callable[[int], None] = lambda settled: None
    tokens_alike: Counter[bool] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    answered: int = 0

    def __post_init__(self) -> None:
        self.tally = Counter(self.ledger.tally)  # with the answers that are not on file yet
        self.failures = len(self.ledger.failed) + len(self.questions.bad)
        self.specials = tuple(t for t in self.tokenizer.all_special_tokens if t)
        self.ends = frozenset({self.tokenizer.eos_token_id} - {None})
        given = self.cfg.extra_body.get("chat_template_kwargs")
        self.template: dict[str, Any] = given if isinstance(given, dict) else {}

    @property
    def done(self) -> int:
        """How much of `total` is on file."""
        return self.ledger.settled

    def where(self, n: int) -> str:
        """The file and line of a question."""
        return f"{self.questions.path}:{self.questions.lines[n]}"

    def fail(self, n: int, error: Exception) -> None:
        """Count a question without an answer. Raises UserError where those are too many."""
        self.failures += 1
        of = self.total + len(self.questions.bad)
        if self.failures > self.cfg.max_failed * of:
            raise UserError(
                f"{self.where(n)}: {error}; {self.failures} of {of} questions have no answer, "
                f"above max_failed={self.cfg.max_failed:g}; see why or raise it, {HINT}"
            ) from None

    def cut(self) -> str:
        """How many answers were cut, of all that were given."""
        cut, answers = self.tally["cut"], self.tally["answers"]
        return f"{cut} of {answers} answers were cut at max_new_tokens={self.cfg.longest}"

    def check_cut(self, least: int = 1) -> None:
        """Raises UserError where there are `least` answers and too many of them were cut."""
        answers = self.tally["answers"]
        if answers < least or self.tally["cut"] <= self.cfg.max_cut * answers:
            return
        raise UserError(
            f"max_cut: {self.cut()}, above {self.cfg.max_cut:g}; give more tokens and another out, "
            f"or raise max_cut: {self.ledger.path} keeps its rows, and {HINT}"
        )

    def converse(self, n: int) -> Generator[Turn, ServerAnswer, dict[str, Any]]:
        """Yields each turn of question n that wants an answer, is sent it, returns the row. An
        answer that was cut ends its conversation: what the user said next was said to a whole
        one, and no end-of-turn token stands between. So does a tool call, whose result nobody
        has. Raises AnswerRefused for an answer that would change the chat."""
        turns, tools = self.questions[n]
        tools = tools or self.cfg.extra_body.get("tools")
        kept: list[dict[str, Any]] = []
        sent: list[dict[str, Any]] = []
        answer = None
        for message in turns:
            kept.append(message)
            sent.append(message)
            if message["role"] == "system":
                continue
            answer = yield Turn(sent, tools, len(kept))
            kept.append(self._message(answer))
            sent.append({"role": "assistant", "content": kept[-1]["content"]})
            if not answer.finished or answer.calls:
                break
        row = {"messages": kept, "complete": answer is not None and answer.finished}
        if tools:
            row["tools"] = tools
        if answer is not None and (self.answered < SURE or n % EVERY == 0):
            self._read(row, answer)
        self.tally.update(tally_of(row))
        self.answered += 1
        return row

    def append(self, rows: list[dict[str, Any]], asked: int, failed: list[list[Any]]) -> None:
        """Put on file what became of the next `asked` questions."""
        for row in rows:
            self.ledger.tally.update(tally_of(row))
        self.ledger.append(rows, asked, failed, goes_on=True)
        self.on_commit(self.done)

    def _message(self, answer: ServerAnswer) -> dict[str, Any]:
        """An answer as a turn of a row."""
        text, thought = answer.text.strip(), answer.reasoning.strip()
        said = f"{text}{thought}{json.dumps(answer.calls, ensure_ascii=False)}"
        if any(s in said for s in self.specials):
            raise AnswerRefused("the answer holds a control token of the target's template")
        if not more_than_text(answer):  # of which `_read` says it
            self._compare(answer, self._ids(answer.text))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if answer.calls:
            message |= {"content": text or None, "tool_calls": answer.calls}
        return message

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def tokens_of(self, answer: ServerAnswer) -> int:
        """Tokens of an answer, counted here where it comes without a count."""
        return max(answer.tokens, 0) or len(self._ids(answer.text + answer.reasoning))

    def _compare(self, answer: ServerAnswer, here: list[int]) -> None:
        """Whether ids that were made here are the model's: the same ids where they are told, else
        as many as were counted (the end-of-turn token may be among them)."""
        if (there := answer.token_ids) is not None:
            self.tokens_alike[there[: len(here)] == here and len(there) - len(here) in (0, 1)] += 1
        elif answer.tokens >= 0:
            self.tokens_alike[answer.tokens - len(here) in (0, 1)] += 1

    def _read(self, row: dict[str, Any], answer: ServerAnswer) -> None:
        """Read a row as training does: whether it can be used, and, where the last answer is
        more than text, whether what would be supervised are the model's tokens."""
        if not self.tokenizer.chat_template:
            return
        how = RowReading(sys.maxsize, self.ends, last_turn_only=True, kwargs=self.template)
        try:
            (found,) = encode(interpret(row, "row"), self.tokenizer, how)
        except (BadRow, ValueError) as problem:
            self.unusable[problem.reason if isinstance(problem, BadRow) else str(problem)] += 1
            return
        if more_than_text(answer):
            here = [i for i, on in zip(found.ids, found.loss, strict=True) if on]
            self._compare(answer, here[:-1] if here[-1] in self.ends else here)


def more_than_text(answer: ServerAnswer) -> bool:
    """Whether the template has a part in an answer: reasoning or tool calls."""
    return bool(answer.reasoning or answer.calls or DELIMITERS.search(answer.text))


def tally_of(row: dict[str, Any]) -> dict[str, int]:
    """What is counted of a row: its answers, and whether the last one was cut."""
    answers = sum(message["role"] == "assistant" for message in row["messages"])
    return {"answers": answers, "cut": int(not row["complete"])}
