"""Given questions that the target answers in this process, a block of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.fits import unfit
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.synthesis.conversation import SURE, Answering, Turn
from outrider.scripts.synthesis.server import AnswerRefused, ServerAnswer
from outrider.scripts.synthesis.write import text_of


@dataclass(kw_only=True)
class InProcess(Answering):
    """The target answers `cfg.batch` questions at a time, turn by turn. A block is on file as a
    whole or not at all, so a run that was killed goes on to the same rows."""

    target: Target

    async def run(self) -> None:
        """Have all of them answered. Raises UserError when too many fail or are cut."""
        while (first := self.ledger.settled) < self.total:
            self.check_cut(SURE)
            block = range(first, min(first + self.cfg.batch, self.total))
            found = self._block(block)
            failed = [
                [self.questions.lines[n], str(found[n])]
                for n in block
                if isinstance(found[n], AnswerRefused)
            ]
            rows = [found[n] for n in block if isinstance(found[n], dict)]
            self.append(rows, len(block), failed)

    def _block(self, numbers: Sequence[int]) -> dict[int, Any]:
        """The row of each question, or AnswerRefused."""
        talks = {n: self.converse(n) for n in numbers}
        heard: dict[int, Any] = dict.fromkeys(numbers)
        found: dict[int, Any] = {}
        while heard:
            requests = {}
            for n, out in heard.items():
                try:
                    turn = talks[n].send(out and self._answer(out))
                    requests[n] = self._request(n, turn)
                except StopIteration as end:
                    found[n] = end.value
                except AnswerRefused as error:
                    self.fail(n, error)
                    found[n] = error
            heard = dict(zip(requests, self._decode(list(requests.values())), strict=True))
        return found

    def _request(self, n: int, turn: Turn) -> Request:
        try:
            ids = chat_ids(self.tokenizer, turn.messages, tools=turn.tools, **self.template)
        except UserError as error:
            raise AnswerRefused(str(error)) from None
        if why := unfit(self.target, len(ids), self.cfg.longest):
            raise AnswerRefused(f"the conversation {why}")
        return Request(ids, self.cfg.longest, id=n << 16 | turn.turn)

    def _decode(self, requests: list[Request]) -> list[Generation]:
        cfg = self.cfg
        run = generate(
            self.target,
            NoDraft(),
            requests,
            Sampling(cfg.answer_temperature, top_p=cfg.answer_top_p),
            batch_size=cfg.batch,
            seed=cfg.seed,
            on_tokens=lambda _, new, __: self.on_tokens(len(new)),
        )
        return run.generations

    def _answer(self, out: Generation) -> ServerAnswer:
        text, ids = text_of(self.target, out), out.token_ids
        if not text.strip():
            raise AnswerRefused("the answer is empty")
        return ServerAnswer(text, out.finish == "eos", len(ids), list(ids))
