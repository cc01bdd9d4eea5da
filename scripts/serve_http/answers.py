"""The JSON of answers, in OpenAI's shapes; what is ours beside them stands under
"speculation"."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from outrider.decode.live import TokenDistribution
from outrider.scripts.serve_http.meters import DraftCounts
from outrider.scripts.serve_http.requested import ApiRequest, BadRequest
from outrider.scripts.serve_http.transcript import Said
from outrider.scripts.serve_http.worker import Ended, Full

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def error(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(why: BadRequest | Full) -> dict[str, Any]:
    """The error object of a request that is not answered."""
    if isinstance(why, Full):
        return error(str(why), 429, code="queue_full")
    return error(str(why), why.status, why.param, why.code)


@dataclass
class Completion:
    """One answer on its way out. said: every token so far."""

    wanted: ApiRequest
    model: str
    tokenizer: Any
    said: list[Said] = field(default_factory=list)

    def __post_init__(self) -> None:
        chat = self.wanted.chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.model,
        }
        self._at = 0  # characters handed out

    # -- whole

    def whole(self, ended: Ended, draft: DraftCounts) -> dict[str, Any]:
        """The answer in one piece."""
        choice = self._choice(ended.text, self.said, ended.finish, ended.generation.token_ids)
        return {
            **self._head,
            "object": "chat.completion" if self.wanted.chat else "text_completion",
            "choices": [choice],
            "usage": usage(ended),
            "speculation": self._speculation(ended, draft),
        }

    # -- in pieces

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if not self.wanted.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})]

    def piece(self, said: list[Said]) -> dict[str, Any]:
        """A few tokens more."""
        return self._chunk(self._choice("".join(s.text for s in said), said, None, None))

    def closing(self, ended: Ended, draft: DraftCounts) -> list[dict[str, Any]]:
        """What a stream ends with."""
        last = self._chunk(self._choice("", [], ended.finish, None))
        last["speculation"] = self._speculation(ended, draft)
        if not self.wanted.usage:
            return [last]
        return [last, {**self._chunk(None), "usage": usage(ended)}]

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.wanted.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [choice]}

    def _choice(
        self, text: str, said: list[Said], finish: str | None, ids: list[int] | None
    ) -> dict[str, Any]:
        whole = finish is not None and ids is not None
        choice: dict[str, Any] = {"index": 0}
        if self.wanted.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice |= {"message": message} if whole else {"delta": {"content": text}}
        else:
            choice["text"] = text
        choice |= {"logprobs": self._logprobs(said), "finish_reason": finish}
        if self.wanted.ids:
            choice["token_ids"] = ids if ids is not None else [s.token for s in said]
            if whole:
                choice["prompt_token_ids"] = self.wanted.ask.ids
        if self.wanted.tokens:
            choice["tokens"] = [{"id": s.token, "text": s.text, "drafted": s.drafted} for s in said]
        return choice

    def _logprobs(self, said: list[Said]) -> dict[str, Any] | None:
        if self.wanted.ask.top is None:
            return None
        distributions = [(s, s.distribution) for s in said if s.distribution is not None]
        if self.wanted.chat:
            return {
                "content": [
                    self._entry(s.token, distribution) for s, distribution in distributions
                ],
                "refusal": None,
            }
        offsets = []
        for one in said:
            if one.distribution is not None:
                offsets.append(self._at)
            self._at += len(one.text)
        return {
            "tokens": [self._name(s.token) for s, _ in distributions],
            "token_logprobs": [distribution.logprob for _, distribution in distributions],
            "top_logprobs": [
                {self._name(token): value for token, value in reversed(distribution.top)}
                for _, distribution in distributions
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, distribution: TokenDistribution) -> dict[str, Any]:
        return {
            **self._token(token, distribution.logprob),
            "top_logprobs": [self._token(other, value) for other, value in distribution.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        spelled = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelled}

    def _name(self, token: int) -> str:
        """A token in the log-probabilities of a completion."""
        return f"token_id:{token}" if self.wanted.named_by_id else self._text(token)

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _speculation(self, ended: Ended, draft: DraftCounts) -> dict[str, Any]:
        cycles = len(ended.generation.cycles)
        return {
            "drafter": self.wanted.ask.drafter,
            "drafted": draft.drafted,
            "accepted": draft.accepted,
            "cycles": cycles,
            "accepted_by_position": draft.by_position,
            "tried_by_position": draft.tried,
            "seconds": round(ended.seconds, 6),
        }


def usage(ended: Ended) -> dict[str, int]:
    """Tokens of prompt and answer."""
    prompt = len(ended.generation.prompt_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": ended.tokens,
        "total_tokens": prompt + ended.tokens,
    }
