"""Questions and their answers, in process or by a server: what a row holds, what is counted, and
when a run stops.

A drafter learns the target's own words, so the target must answer. What a row holds is text, and
training tokenizes it again through the target's chat template; `tokens_alike` counts how often
that gives the tokens that the model drew. Reasoning and tool calls that a server keeps apart stay
apart in the row; what is sent back to it is the text alone, as chat programs do it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.ledger import Ledger, say
from outrider.scripts.data.questions import Question, Questions
from outrider.scripts.data.server import AnswerRefused, ServerAnswer
from outrider.train.data.config import RowsConfig
from outrider.train.data.rows import BadRow, encode, interpret

HINT = "the same command goes on from here"
SURE = 256  # answers after which a share of cut ones is believed; so many are read as training does
UNLIKE = 0.5  # below this share of answers with the same tokens here, something is wrong


@dataclass
class Answering:
    """Questions up to `total`, of which the ledger's are answered. A subclass's `run` has the
    rest answered; it raises UserError when too many fail or are cut.

    tokenizer: the target's. questions: None where the target invents them. on_rows: told how
    many rows are on file. failed: question -> why it has no answer; the next run asks it again.
    tokens: drawn in this run."""

    cfg: SynthesizeConfig
    ledger: Ledger
    total: int
    tokenizer: Any
    questions: Questions | None = None
    on_rows: Callable[[int], None] = lambda rows: None
    failed: dict[int, str] = field(default_factory=dict)
    tokens_alike: Counter[bool] = field(default_factory=Counter)
    unusable: list[str] = field(default_factory=list)
    answered: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        # Training refuses NUL as well.
        self.specials = ("\0", *filter(None, self.tokenizer.all_special_tokens))
        self.ends = frozenset({self.tokenizer.eos_token_id} - {None})
        given = self.cfg.extra_body.get("chat_template_kwargs")
        self.template: dict[str, Any] = given if isinstance(given, dict) else {}

    @property
    def missing(self) -> list[int]:
        """The questions without a row, and without a failure in this run."""
        done = self.ledger.numbers
        return [n for n in range(self.total) if n not in done and n not in self.failed]

    def question(self, n: int) -> Question:
        """Return question n."""
        assert self.questions is not None
        return self.questions.asked[n][1]

    def where(self, n: int) -> str:
        """Return the file and line of a question."""
        assert self.questions is not None
        return f"{self.questions.path}:{self.questions.asked[n][0]}"

    def fail(self, n: int, error: Exception) -> None:
        """Count a question without an answer. Raises UserError where those are too many."""
        self.failed[n] = str(error)
        if len(self.failed) > self.cfg.max_failed * self.total:
            raise UserError(
                f"{self.where(n)}: {error}; {len(self.failed)} of {self.total} questions have no "
                f"answer, above max_failed={self.cfg.max_failed:g}; see why or raise it, {HINT}"
            ) from None

    def cut(self) -> str:
        """Return how many answers were cut, of all that were given."""
        cut, answers = self.ledger.tally["cut"], self.ledger.tally["answers"]
        return f"{cut} of {answers} answers were cut at max_new_tokens={self.cfg.longest}"

    def check_cut(self, least: int = 1) -> None:
        """Raise UserError where there are `least` answers and too many of them were cut."""
        answers = self.ledger.tally["answers"]
        if answers < least or self.ledger.tally["cut"] <= self.cfg.max_cut * answers:
            return
        raise UserError(
            f"max_cut: {self.cut()}, above {self.cfg.max_cut:g}; give more tokens and another out, "
            f"or raise max_cut: {self.ledger.path} keeps its rows, and {HINT}"
        )

    def converse(self, n: int) -> Generator[Question, ServerAnswer, dict[str, Any]]:
        """Yield the messages before each answer of question n, and the tools; is sent the answer,
        returns the row. An answer that was cut ends its conversation: what the user said next was
        said to a whole one, and no end-of-turn token is between. So does a tool call, whose
        result nobody has. Raises AnswerRefused for an answer that would change the chat."""
        turns, tools = self.question(n)
        tools = tools or self.cfg.extra_body.get("tools")
        kept: list[dict[str, Any]] = []
        sent: list[dict[str, Any]] = []
        ids, loss = list[int](), list[int]()
        for message in turns:
            kept.append(message)
            sent.append(message)
            if message["role"] == "system":
                continue
            answer = yield sent, tools
            kept.append(self._message(answer))
            if self.cfg.tokens:
                prompt, drawn = self._ids(answer, sent, tools)
                loss = loss if prompt[: len(ids)] == ids else []  # else it is rendered anew
                loss = [*loss, *[0] * (len(prompt) - len(loss)), *[1] * len(drawn)]
                ids = prompt + drawn
            sent.append({"role": "assistant", "content": kept[-1]["content"]})
            if not answer.finished or answer.calls:
                break
        row: dict[str, Any] = {"line": n, "messages": kept, "complete": answer.finished}
        if tools:
            row["tools"] = tools
        if self.answered < SURE:
            self._read(row, answer)
        self.answered += 1
        return row | ({"input_ids": ids, "loss_mask": loss} if ids else {})

    def _ids(
        self, answer: ServerAnswer, sent: list[dict[str, Any]], tools: Any
    ) -> tuple[list[int], list[int]]:
        """Return the tokens that were read before an answer, and those of the answer."""
        if answer.token_ids is None:
            raise UserError("tokens: the server returns no token ids; vLLM does, or leave it out")
        read = answer.prompt_ids or chat_ids(self.tokenizer, sent, tools=tools, **self.template)
        return read, answer.token_ids

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Put rows on file."""
        self.ledger.append(rows)
        self.on_rows(len(self.ledger.numbers))

    def _message(self, answer: ServerAnswer) -> dict[str, Any]:
        """Return an answer as a turn of a row. A cut one loses the character within which it
        ended: its tokens are not those of the sign in its place."""
        text, thought = answer.text.strip(), answer.reasoning.strip()
        if not answer.finished:
            text, thought = (said.removesuffix("\ufffd") for said in (text, thought))
        said = f"{text}{thought}{json.dumps(answer.calls, ensure_ascii=False)}"
        if any(s in said for s in self.specials):
            raise AnswerRefused("the answer holds a control token of the target's template, or NUL")
        if not text and not thought and not answer.calls:
            raise AnswerRefused("the answer is empty")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if answer.calls:
            message |= {"content": text or None, "tool_calls": answer.calls}
        return message

    def _read(self, row: dict[str, Any], answer: ServerAnswer) -> None:
        """Read a row as training does: whether it can be used, and whether what would be
        supervised of the last answer are the model's tokens: the same ids where the server returns
        them, else as many as were counted (the end-of-turn token may be among them)."""
        how = RowsConfig(1 << 20, last_turn_only=True, chat_template_kwargs=self.template)
        try:
            (found,) = encode(interpret(row, "row"), self.tokenizer, how, self.ends)
        except (BadRow, ValueError) as problem:
            if not self.cfg.tokens:  # else training reads the tokens
                self.unusable.append(getattr(problem, "reason", str(problem)))
            return
        here = [i for i, on in zip(found.ids, found.loss, strict=True) if on]
        here = here[:-1] if here[-1] in self.ends else here
        if (there := answer.token_ids) is not None:
            self.tokens_alike[there[: len(here)] == here and len(there) - len(here) in (0, 1)] += 1
        elif answer.tokens >= 0:
            self.tokens_alike[answer.tokens - len(here) in (0, 1)] += 1

    def closing(self) -> None:
        """Say what a training run on the rows should know."""
        if self.failed:
            n, reason = next(iter(self.failed.items()))
            first = f"the first {self.where(n)}: {reason}"
            say(f"{len(self.failed)} questions without an answer, {first}")
        say(self.cut())
        if self.template:
            say(f"asked with {self.template}: train with the same data.chat_template_kwargs")
        if self.unusable:
            say(
                f"warning: training would leave out {len(self.unusable)} of the rows that were "
                f"looked at, one because {self.unusable[0]}"
            )
        if not (counted := self.tokens_alike.total()):
            return
        alike = self.tokens_alike[True] / counted
        say(f"{alike:.1%} of the answers keep the model's tokens in the target's tokenizer")
        if alike < UNLIKE and self.cfg.backend == "openai":
            say(
                "warning: so few mean that the server's model has another tokenizer than target, "
                "or that the server cuts something out of its answers (reasoning, for one)"
            )
        elif alike < UNLIKE:
            say("warning: text does not keep the tokens here; tokens=true keeps them in the rows")
