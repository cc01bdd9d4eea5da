"""What a request's body asks for, read key by key: an unknown key, a value of another type or
out of range is refused in a line that names it. What would change the answer and is not
supported is refused too, rather than left out.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.conf.errors import UserError
from outrider.conf.jsonl import HALF, is_whole, parse_line
from outrider.conf.typed import nearest
from outrider.decode.sampling import Sampling
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.serve_http.worker import CompletionRequest

MOST_TOP = 20  # tokens told beside the chosen one
MOST_STOPS, LONGEST_STOP = 4, 1000
ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys that change nothing here, and those of which only the value that changes nothing is taken.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "parallel_tool_calls": (True, False, None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "reasoning_effort": ("none", None),
}


class BadRequest(Exception):
    """A request that is not answered. param: the key at fault. code: OpenAI's short name of
    the reason."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Service:
    """What requests are checked against. longest: tokens of prompt and answer. usual: tokens
    of an answer whose request names no limit. tokenizer: one that no other thread uses."""

    model: str
    drafters: tuple[str, ...]
    longest: int
    usual: int
    vocab: int
    tokenizer: Any


@dataclass(frozen=True)
class ApiRequest:
    """A request. ids: the token ids of prompt and answer are told. tokens: each token's text
    is told, and whether it was drafted. named_by_id: the log-probabilities of a completion
    name tokens as token_id:7."""

    ask: CompletionRequest
    chat: bool
    stream: bool
    usage: bool
    ids: bool
    tokens: bool
    named_by_id: bool = False


class Body:
    """The keys of a body, each taken once; what is left over is unknown."""

    def __init__(self, raw: bytes):
        try:
            found = parse_line(raw)
        except ValueError as error:
            raise BadRequest(f"body: {error}; send one JSON object") from None
        if not isinstance(found, dict):
            raise BadRequest(f"body: a {type(found).__name__}; send one JSON object")
        self._left: dict[str, Any] = found
        self._known: list[str] = []

    def take(self, key: str) -> Any:
        """The value; None where it is not given."""
        self._known.append(key)
        return self._left.pop(key, None)

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """A finite number in [least, most]."""
        value = self.take(key)
        if value is None:
            return default
        number = not isinstance(value, bool) and isinstance(value, int | float)
        # An int may be too large for a float, so it is compared before it is turned into one.
        if not number or not (math.isfinite(value) if isinstance(value, float) else True):
            raise BadRequest(f"{key}: {_short(value)} is no number; give one", key)
        if not least <= value <= most:
            raise BadRequest(f"{key}: {_short(value)} is outside [{least:g}, {most:g}]", key)
        return float(value)

    def whole(self, key: str, default: int | None, least: int, most: int) -> int | None:
        """A whole number in [least, most]."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{key}: {_short(value)} is no whole number; give one", key)
        if not least <= value <= most:
            raise BadRequest(f"{key}: {_short(value)} is outside [{least}, {most}]", key)
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where it is not given."""
        value = self.take(key)
        if not isinstance(value, bool | None):
            raise BadRequest(f"{key}: {_short(value)} is neither true nor false", key)
        return bool(value)

    def neutral(self) -> None:
        """Keys that may be there if they ask for nothing. Raises Refused for the others."""
        for key in IGNORED:
            self.take(key)
        for key, values in NEUTRAL.items():
            value = self.take(key)
            if not any(_same(value, one) for one in values):
                raise BadRequest(f"{key}: {_short(value)} is not supported; leave it out", key)

    def finish(self) -> None:
        """Raises Refused for a key that nobody took."""
        for key in self._left:
            short = key if len(key) < 60 else f"{key[:60]}..."
            shown = short if short.isprintable() else _short(short)
            fix = nearest(shown, [*self._known])
            raise BadRequest(f"{shown}: no such key; {fix}", shown, code="unknown_parameter")


def wanted(raw: bytes, chat: bool, service: Service) -> ApiRequest:
    """A body of /v1/chat/completions or /v1/completions. Raises Refused."""
    body = Body(raw)
    model = body.take("model")
    if model is None:
        raise BadRequest(f"model: is required; set model={service.model}", "model")
    if model != service.model:
        said = f"model: {_short(model)} is not served here; the model is {service.model}"
        raise BadRequest(said, "model", 404, "model_not_found")
    drafter = body.take("drafter")
    if drafter is not None and drafter not in service.drafters:
        known = ", ".join(service.drafters)
        raise BadRequest(
            f"drafter: {_short(drafter)} is not loaded; choose among {known}", "drafter"
        )
    ids = _chat(body, service) if chat else _prompt(body, service)
    limit = _limit(body, chat, len(ids), service)
    sampling = _sampling(body, service)
    seed = body.whole("seed", None, -(1 << 63), (1 << 63) - 1)
    top = _top(body, chat)
    stops = _stops(body)
    stream = body.flag("stream")
    usage = _usage(body, stream)
    ids_too, tokens_too = body.flag("return_token_ids"), body.flag("return_tokens")
    named_by_id = not chat and body.flag("return_tokens_as_token_ids")
    body.neutral()
    body.finish()
    ask = CompletionRequest(
        ids,
        limit,
        sampling,
        service.drafters[0] if drafter is None else drafter,
        secrets.randbits(63) if seed is None else seed,
        top,
        stops,
    )
    return ApiRequest(ask, chat, stream, usage, ids_too, tokens_too, named_by_id)


def _chat(body: Body, service: Service) -> list[int]:
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: give a list with one message or more", "messages")
    plain = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise BadRequest(f'{where}: give {{"role": ..., "content": ...}}', "messages")
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"{where}.role: {_short(role)} is none of {', '.join(ROLES)}", "messages"
            )
        plain.append({"role": role, "content": _content(message.get("content"), where)})
    return _counted("messages", service, lambda: chat_ids(service.tokenizer, plain))


def _content(content: Any, where: str) -> str:
    """Text, or parts of text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{where}.content: give text; nothing else is read here", "messages")
    return "".join(text for text in texts if text)


def _prompt(body: Body, service: Service) -> list[int]:
    prompt = body.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        wrong = next((token for token in prompt if not 0 <= token < service.vocab), None)
        if wrong is not None:
            said = f"prompt: token {_short(wrong)} is outside 0..{service.vocab - 1}"
            raise BadRequest(said, "prompt")
        return _counted("prompt", service, lambda: prompt)
    if not isinstance(prompt, str):
        raise BadRequest("prompt: give one text, or one list of token ids", "prompt")
    if not is_whole(prompt):
        raise BadRequest(f"prompt: holds {HALF}; write the whole character, or remove it", "prompt")
    return _counted("prompt", service, lambda: list(service.tokenizer(prompt)["input_ids"]))


def _counted(key: str, service: Service, ids: Callable[[], list[int]]) -> list[int]:
    """Token ids, at least one and few enough to leave room for an answer."""
    try:
        found = ids()
    except UserError as error:
        raise BadRequest(str(error), key) from None
    if not found:
        raise BadRequest(f"{key}: is empty; give at least one token", key)
    if len(found) >= service.longest:
        said = (
            f"{key}: {len(found)} tokens, and prompt and answer together hold "
            f"{service.longest}; shorten it"
        )
        raise BadRequest(said, key, code="context_length_exceeded")
    return found


def _limit(body: Body, chat: bool, size: int, service: Service) -> int:
    room = service.longest - size
    given = body.whole("max_tokens", None, 1, 1 << 31)
    newer = body.whole("max_completion_tokens", None, 1, 1 << 31) if chat else None
    limit = newer or given
    if limit is None:
        return min(service.usual, room)
    if limit > room:
        said = (
            f"max_tokens: {limit} behind a prompt of {size} tokens exceed the "
            f"{service.longest} that both together hold; ask for {room}"
        )
        raise BadRequest(said, "max_tokens", code="context_length_exceeded")
    return limit


def _sampling(body: Body, service: Service) -> Sampling:
    temperature = body.number("temperature", 1.0, 0.0, 1e4)
    top_p = body.number("top_p", 1.0, 0.0, 1.0)
    min_p = body.number("min_p", 0.0, 0.0, 1.0)
    top_k = body.whole("top_k", 0, -1, 1 << 31) or 0
    penalty = body.number("repetition_penalty", 1.0, 1e-3, 1e3)
    try:
        # Off is 0 here and -1 or the whole vocabulary elsewhere.
        top_k = 0 if top_k < 0 or top_k >= service.vocab else top_k
        if (
            temperature == 0
        ):  # one distribution, whatever else is given: such requests share a batch
            return Sampling(0.0, repetition_penalty=penalty)
        return Sampling(temperature, top_k, top_p, min_p, penalty)
    except UserError as error:
        raise BadRequest(str(error), str(error).partition("=")[0]) from None


def _top(body: Body, chat: bool) -> int | None:
    if not chat:
        return body.whole("logprobs", None, 0, MOST_TOP)
    with_logprobs = body.flag("logprobs")
    top = body.whole("top_logprobs", None, 0, MOST_TOP)
    if top is not None and not with_logprobs:
        raise BadRequest("top_logprobs: needs logprobs=true", "top_logprobs")
    return (top or 0) if with_logprobs else None


def _stops(body: Body) -> tuple[str, ...]:
    stops = body.take("stop")
    if stops is None:
        return ()
    given = [stops] if isinstance(stops, str) else stops
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise BadRequest("stop: give a text or a list of texts", "stop")
    if len(given) > MOST_STOPS:
        raise BadRequest(f"stop: {len(given)} texts; give at most {MOST_STOPS}", "stop")
    if any(not stop or len(stop) > LONGEST_STOP for stop in given):
        raise BadRequest(f"stop: a text is empty or longer than {LONGEST_STOP} characters", "stop")
    return tuple(given)


def _usage(body: Body, stream: bool) -> bool:
    """Whether a stream ends with its usage."""
    requested = body.take("stream_options")
    if requested is None:
        return False
    known = isinstance(requested, dict) and set(requested) <= {
        "include_usage",
        "include_obfuscation",
    }
    if not known or not all(isinstance(value, bool) for value in requested.values()):
        raise BadRequest("stream_options: only include_usage is known", "stream_options")
    if not stream:
        raise BadRequest("stream_options: needs stream=true", "stream_options")
    return bool(requested.get("include_usage"))


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON is: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _short(value: Any) -> str:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return shown if len(shown) < 80 else f"{shown[:77]}..."
