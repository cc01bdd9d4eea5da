"""Questions that the target answers in this process, a block of them at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.checks import unfit
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.data.answering import SURE, Answering
from outrider.scripts.data.questions import Question
from outrider.scripts.data.server import AnswerRefused, ServerAnswer


@dataclass(kw_only=True)
class InProcess(Answering):
    """The target answers `cfg.batch` questions at a time, turn by turn. A block is written in
    one piece, so a run that was killed goes on to the same rows."""

    target: Target

    def run(self) -> None:
        """Have all of them answered. Raises UserError when too many fail or are cut."""
        for numbers in self.blocks():
            self.check_cut(SURE)
            self.append(self._block(numbers))

    def blocks(self) -> Iterator[Sequence[int]]:
        """Yield the numbers of the questions of each block; it begins at a multiple of the
        batch."""
        for _, block in groupby(self.missing, lambda n: n // self.cfg.batch):
            yield [*block]

    def _block(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of questions, but of those that have no answer."""
        talks = {n: self.converse(n) for n in numbers}
        heard: dict[int, Any] = dict.fromkeys(numbers)
        found: dict[int, dict[str, Any]] = {}
        sampling = Sampling(self.cfg.answer_temperature, top_p=self.cfg.answer_top_p)
        while heard:
            requests = {}
            for n, out in heard.items():
                try:
                    requests[n] = self._request(n, talks[n].send(out and self._answer(out)))
                except StopIteration as end:
                    found[n] = end.value
                except AnswerRefused as error:
                    self.fail(n, error)
            outs = self.decode(list(requests.values()), sampling, 2 * self.cfg.seed + 1)
            heard = dict(zip(requests, outs, strict=True))
        return [found[n] for n in numbers if n in found]

    def _request(self, n: int, asked: Question) -> Request:
        messages, tools = asked
        try:
            ids = chat_ids(self.tokenizer, messages, tools=tools, **self.template)
        except UserError as error:
            raise AnswerRefused(str(error)) from None
        if why := unfit(self.target, len(ids), self.cfg.longest):
            raise AnswerRefused(f"the conversation {why}")
        return Request(ids, self.cfg.longest, id=len(messages) - 1 << 48 | n)

    def decode(
        self,
        requests: list[Request],
        sampling: Sampling,
        seed: int,
        stop: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Return whatever follows the requests. stop: tokens that end it, in place of the
        target's."""
        how: Any = {"batch_size": self.cfg.batch, "seed": seed, "eos_ids": stop}
        run = generate(self.target, NoDraft(), requests, sampling, **how)
        self.tokens += sum(len(one.token_ids) for one in run.generations)
        return run.generations

    def _answer(self, out: Generation) -> ServerAnswer:
        ids = list(out.token_ids)
        return ServerAnswer(self.text(out), out.finish == "eos", len(ids), ids)

    def text(self, out: Generation) -> str:
        """Return what was decoded, without its end-of-turn token; other special tokens are
        shown."""
        ids = out.token_ids[:-1] if out.finish == "eos" else out.token_ids
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
