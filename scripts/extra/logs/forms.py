"""One exchange out of a line of a log, whichever program wrote it.

Known are chat completions and completions of the OpenAI API, request and response under any
keys of one line (LiteLLM, proxies), as JSON within JSON (llama.cpp), as the two files of a
batch (OpenAI, `vllm run-batch`: joined by custom_id), and answers that were streamed (a list of
chunks, or the events' text). llama.cpp's own `/completion` is known too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

DEPTH = 6  # how deep request and response may be nested
TIMES = (
    *("timestamp", "@timestamp", "time", "ts", "request_time", "start_time", "startTime"),
    *("created_at", "createdAt", "created", "date", "datetime"),
)
TEXTS = ("messages", "choices", "tools")  # what these hold is no part of the log's own form
REDACTED = "redacted-by-litellm"
OTHER_CHUNK = "a chunk of its stream is of another form"
EARLIEST = datetime(1990, 1, 1, tzinfo=UTC).timestamp()
LATEST = datetime(2200, 1, 1, tzinfo=UTC).timestamp()


class Unusable(Exception):
    """Why a line gives no exchange, in words that hold nothing of the line itself."""


@dataclass
class Exchange:
    """What was asked and answered. request: the messages; empty where prompt is given, the
    text of a completion. answer: the assistant's message. models: the names that the line
    gives to the model. when: seconds since 1970, None where the line does not say.
    complete: the answer ended with its end-of-turn token."""

    where: str
    request: list[Any]
    answer: dict[str, Any]
    models: tuple[str, ...] = ()
    prompt: str | list[int] | None = None
    when: float | None = None
    category: str = ""
    complete: bool = True
    tools: Any = None


@dataclass
class Half:
    """A line, with the request and the response that are found in it; one of a batch's two
    files holds only one of both, and says by its custom_id to which other line it belongs."""

    where: str
    record: dict[str, Any]
    request: dict[str, Any] | None
    response: Any

    @property
    def custom_id(self) -> str:
        return str(self.record["custom_id"])


def read(record: Any, where: str, category_key: str) -> Exchange | Half:
    """The exchange in a record, or its half. Raises Unusable."""
    if not isinstance(record, dict):
        raise Unusable("is not an object {..}")
    half = Half(where, record, _find(record, _is_request), _find(record, _is_response))
    batched = isinstance(record.get("custom_id"), str | int)
    if batched and (half.request is None) != (half.response is None):
        return half
    return joined(half, half, category_key)


def joined(requested: Half, answered: Half, category_key: str) -> Exchange:
    """The exchange of a batch's two lines, or of a line that holds both; where it stands is
    the answer's line. Raises Unusable."""
    request, response = requested.request, answered.response
    if request is None or response is None:
        raise Unusable(_why_not(answered.record, request))
    answer, end, details = _answer(response)
    ended = end in ("stop", "tool_calls", "function_call", "eos")
    records = [answered.record, *([requested.record] if requested is not answered else [])]
    exchange = Exchange(
        answered.where,
        [],
        answer,
        _models(details, request, *records),
        when=next(filter(None, map(moment, _times(*records, request, details))), None),
        category=next((c for r in records for c in _named(r, category_key)), ""),
        complete=ended and not _stopped_by_word(request, details),
        tools=request.get("tools"),
    )
    messages = request.get("messages")
    if isinstance(messages, list) and messages:
        exchange.request = messages
    else:
        exchange.prompt = _prompt(request.get("prompt"))
    if REDACTED in (answer.get("content"), exchange.prompt) or any(
        isinstance(m, dict) and m.get("content") == REDACTED for m in exchange.request
    ):
        raise Unusable("the log keeps no text (redacted)")
    return exchange


# -- finding request and response


def _opened(value: Any) -> Any:
    """JSON within JSON, and the events of a stream, as what they stand for."""
    if not isinstance(value, str):
        return value
    text = value.lstrip()
    if text.startswith("data:"):
        return _events(text)
    if text[:1] in ("{", "[") and ('"messages"' in text or '"c' in text or '"prompt"' in text):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return value
    return value


def _events(text: str) -> list[Any]:
    """The chunks of a stream's text: lines `data: {..}`, `data: [DONE]` at the end."""
    found = []
    for line in text.splitlines():
        body = line.removeprefix("data:").strip()
        if line.startswith("data:") and body and body != "[DONE]":
            try:
                found.append(json.loads(body))
            except (ValueError, RecursionError):
                raise Unusable("a chunk of its stream is not JSON") from None
    return found


def _walk(record: Any) -> Iterator[Any]:
    """Everything nested in a record, outermost first, but not what messages hold."""
    level = [record]
    for _ in range(DEPTH):
        below: list[Any] = []
        for value in level:
            yield value
            if isinstance(value, dict):
                inner = (v for k, v in value.items() if k not in TEXTS or isinstance(v, dict))
                below += [o for v in inner if isinstance(o := _opened(v), dict | list)]
        level = below


def _find(record: Any, fits: Any) -> Any:
    return next((value for value in _walk(record) if fits(value)), None)


def _is_request(value: Any) -> bool:
    if not isinstance(value, dict) or "choices" in value:
        return False
    prompt = value.get("prompt")
    asks = isinstance(prompt, str | list) and bool(prompt)
    native = "content" in value and "generation_settings" in value  # llama.cpp's own answer
    return _is_chat(value.get("messages")) or (asks and not native)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def _is_response(value: Any) -> bool:
    if isinstance(value, list):
        parts = [_opened(part) for part in value]
        parts = [part[0] if isinstance(part, list) and part else part for part in parts]
        return bool(parts) and any(isinstance(p, dict) and _is_response(p) for p in parts)
    if not isinstance(value, dict):
        return False
    native = isinstance(value.get("content"), str) and bool(
        {"tokens_predicted", "generation_settings", "stop"} & value.keys()
    )
    return isinstance(value.get("choices"), list) or (native and "messages" not in value)


def _why_not(record: dict[str, Any], request: Any) -> str:
    """Why a record holds no exchange."""
    status = _status(record)
    failed = (isinstance(status, int) and status >= 400) or status == "failure"
    if failed or any(isinstance(v, dict) and v.get("error") for v in _walk(record)):
        return "the request failed"
    for value in _walk(record):
        if not isinstance(value, dict):
            continue
        if value.get("type") == "message" and isinstance(value.get("content"), list):
            return "another API's form (Anthropic's Messages)"
        if value.get("object") == "response" or isinstance(value.get("output"), list):
            return "another API's form (OpenAI's Responses)"
        if "candidates" in value or "contents" in value:
            return "another API's form (Gemini)"
        if isinstance(value.get("message"), dict) and "done" in value:
            return "another API's form (Ollama)"
        if "embedding" in value or "embeddings" in value:
            return "no text was asked for (embeddings)"
    if request is None and any("messages" in v for v in _walk(record) if isinstance(v, dict)):
        return "its messages are no list of objects"
    if request is None:
        return "another API's form (no messages or prompt, no choices)"
    messages = request.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return "a chat row, no log: it has no response (train on it with data.path)"
    return "the answer is missing"


def _status(record: dict[str, Any]) -> Any:
    found = record.get("status_code", record.get("status"))
    response = record.get("response")
    if found is None and isinstance(response, dict):
        found = response.get("status_code", response.get("status"))
    return found


# -- the answer


def _answer(response: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The assistant's message, why it ended ("" when it was cut off), and what else the
    response says."""
    if isinstance(response, list):
        response = _streamed(response)
    if "choices" not in response:
        return _native(response)
    choices = response["choices"]
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise Unusable("the answer is missing")
    message = choice.get("message")
    if isinstance(choice.get("text"), str):
        message = {"content": choice["text"]}
    elif "delta" in choice and message is None:
        return _answer([response])
    if not isinstance(message, dict):
        raise Unusable("the answer is missing")
    end = str(choice.get("finish_reason") or "")
    if end == "content_filter":
        raise Unusable("the answer was filtered")
    if message.get("refusal"):
        raise Unusable("the answer is a refusal of the server's own")
    kept = {k: message[k] for k in ("content", "tool_calls") if message.get(k) is not None}
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought.strip():
        kept["reasoning_content"] = thought
    if not kept.get("tool_calls") and not str(kept.get("content") or "").strip():
        raise Unusable("the answer is empty")
    details = {k: choice[k] for k in ("stop_reason",) if k in choice}
    return {"role": "assistant", "content": None, **kept}, end, {**response, **details}


def _native(response: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """llama.cpp's /completion."""
    text = response.get("content")
    if not isinstance(text, str) or not text.strip():
        raise Unusable("the answer is empty")
    kind = response.get("stop_type")
    ended = kind == "eos" or (kind is None and bool(response.get("stopped_eos")))
    return {"role": "assistant", "content": text}, "stop" if ended else "length", response


def _streamed(chunks: list[Any]) -> dict[str, Any]:
    """The response that a list of chunks makes."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        opened = _opened(chunk)
        for one in opened if isinstance(opened, list) else [opened]:
            if not isinstance(one, dict):
                raise Unusable("a chunk of its stream is not an object")
            parts.append(one)
    if any("choices" not in part and isinstance(part.get("content"), str) for part in parts):
        text = "".join(part.get("content") or "" for part in parts)
        return {**parts[-1], "content": text}
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    end = stop = None
    whole: dict[str, Any] = {}
    plain = False
    for part in parts:
        whole = {**part, **{k: v for k, v in whole.items() if v is not None}}
        choices = part.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            end = choice.get("finish_reason") or end
            stop = choice.get("stop_reason") or stop
            plain = plain or isinstance(choice.get("text"), str)
            delta = choice.get("delta") or choice.get("message") or {}
            if isinstance(choice.get("text"), str):
                delta = {"content": choice["text"]}
            called = delta.get("tool_calls") or [] if isinstance(delta, dict) else None
            if not isinstance(called, list):
                raise Unusable(OTHER_CHUNK)
            for key in ("content", "reasoning_content", "reasoning", "refusal"):
                if isinstance(delta.get(key), str):
                    message[key] = message.get(key, "") + delta[key]
            for call in called:
                _add_call(calls, call)
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    choice = {"message": message, "finish_reason": end}
    if stop is not None:
        choice["stop_reason"] = stop
    if plain:
        choice["text"] = message.get("content", "")
    return {**whole, "choices": [choice]}


def _add_call(calls: dict[int, dict[str, Any]], call: Any) -> None:
    """A part of a tool call that was streamed."""
    if not isinstance(call, dict) or not isinstance(call.get("function") or {}, dict):
        raise Unusable(OTHER_CHUNK)
    at = call.get("index", len(calls))
    made = calls.setdefault(
        at if isinstance(at, int) else len(calls),
        {"type": "function", "function": {"name": "", "arguments": ""}},
    )
    if call.get("id"):
        made["id"] = call["id"]
    for key in ("name", "arguments"):
        made["function"][key] += str((call.get("function") or {}).get(key) or "")


def _stopped_by_word(request: dict[str, Any], details: dict[str, Any]) -> bool:
    """Whether a stop string, not the model, ended the answer. vLLM and llama.cpp say so;
    elsewhere a request with stop strings leaves it open, and the end is not believed."""
    if details.get("stop_type") is not None:
        return details["stop_type"] == "word"
    if isinstance(details.get("stop_reason"), str):
        return True
    return bool(request.get("stop")) and "stop_reason" not in details


def _prompt(value: Any) -> str | list[int]:
    """A completion's prompt: a text, or token ids."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(type(i) is int for i in value):
        return value
    raise Unusable("several prompts in one request, or none")


# -- what a record says about itself


def _models(*records: dict[str, Any]) -> tuple[str, ...]:
    names = [r.get(k) for r in records for k in ("model", "model_group", "model_name", "model_id")]
    return tuple(dict.fromkeys(n for n in names if isinstance(n, str) and n))


def _times(*records: dict[str, Any]) -> Iterator[Any]:
    for record in records:
        yield from (record[key] for key in TIMES if record.get(key) is not None)


def _named(record: dict[str, Any], key: str) -> Iterator[str]:
    for value in _walk(record):
        given = value.get(key) if isinstance(value, dict) else None
        if isinstance(given, str | int) and (text := str(given).strip()):
            yield text


def moment(value: Any) -> float | None:
    """Seconds since 1970 of a time in one of the forms in use: seconds, milli-, micro- or
    nanoseconds as a number or its text, or ISO 8601 (without a zone: UTC). None for others."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text)
        except ValueError:
            try:
                made = datetime.fromisoformat(text)
                details = (made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                return None
            return details if EARLIEST <= details < LATEST else None  # year 1: Go's "no time"
    if not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    for scale in (1, 1e3, 1e6, 1e9):
        if EARLIEST <= value / scale < LATEST:
            return value / scale
    return None
