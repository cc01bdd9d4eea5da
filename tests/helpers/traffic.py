"""A made-up log of a server's traffic, with everything that a real one holds, and how many of
each: several wire forms, three models, tool calls, reasoning, long prompts, chats that go on,
duplicates, secrets, and lines that are broken in every known way.

    python -m tests.helpers.traffic runs/traffic.jsonl 5000
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VOCABULARY = """
the a of to in and for with that this when which on at from by is was are will can may
should server request answer table column index user order invoice shipment customer address
branch commit function class method value list string number error warning cache memory disk
thread process node cluster token model prompt query result summary report meeting project
deadline team manager product release version feature ticket patch review garden recipe
flour butter oven minutes mountain river train station ticket journey winter morning letter
sister history engine pressure voltage signal network packet latency budget contract clause
payment account balance interest patient treatment dose doctor school lesson teacher
exercise question please
"""
WORDS = VOCABULARY.split()
NAMES = ("ada", "grace", "alan", "edsger", "barbara", "donald", "leslie", "tony", "frances")
# Share of the exchanges, in thousandths, by what stands in their line; the rest is plain.
KINDS = {
    "tool calls": 50,
    "reasoning": 50,
    "long prompt": 20,
    "other model": 160,
    "cut line": 10,
    "failed": 10,
    "empty answer": 5,
    "filtered": 5,
    "duplicate": 20,
    "went on": 20,
    "not UTF-8": 2,
    "NUL": 2,
    "half a surrogate": 2,
    "NaN in a tool call": 2,
    "NaN beside": 2,
    "Anthropic's form": 4,
    "no object": 2,
}
# What the reader says of a kind that gives no row.
REASONS = {
    "other model": "answered by another model",
    "cut line": "is not JSON",
    "failed": "the request failed",
    "empty answer": "the answer is empty",
    "filtered": "the answer was filtered",
    "duplicate": "duplicates",
    "went on": "held by a later request of the same chat",
    "not UTF-8": "is not UTF-8",
    "NUL": "holds a NUL byte",
    "NaN in a tool call": "holds NaN or Infinity, which no JSON has",
    "half a surrogate": "a turn: holds half of a surrogate pair",
    "Anthropic's form": "another API's form (Anthropic's Messages)",
    "no object": "is not an object {..}",
}
OTHERS = ("gpt-4o", "qwen3-8b")  # the two models beside the target


def prose(rng: random.Random, letters: int) -> str:
    """About so many letters of sentences, lists, code and numbers."""
    parts: list[str] = []
    size = 0
    while size < letters:
        parts.append(_part(rng))
        size += len(parts[-1]) + 1
    return " ".join(parts)


def _part(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(6, 14))]
    kind = rng.random()
    if kind < 0.80:
        return " ".join(words).capitalize() + rng.choice((".", ".", "?", ":", ";\n"))
    if kind < 0.86:
        name, other = words[0], words[1]
        return f"\n```python\ndef {name}_{other}(self, {words[2]}={rng.randint(0, 99)}):\n    return [x for x in self.{other} if x > {rng.random():.4f}]\n```\n"
    if kind < 0.90:
        day = f"20{rng.randint(10, 26)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        return f"On {day} at {rng.randint(0, 23):02}:{rng.randint(0, 59):02} the {words[0]} took {rng.randint(2, 9000)} ms."
    if kind < 0.94:
        return f"\n- {words[0]}: {rng.randint(1, 10 ** rng.randint(1, 9)):,}\n- {words[1]} {rng.random() * 100:.2f} %\n"
    if kind < 0.97:
        return f"See https://docs.example.com/{words[0]}/{words[1]}?v={rng.randint(1, 40)} or /usr/lib/{words[2]}/{words[3]}.so.{rng.randint(1, 9)}."
    return json.dumps({words[0]: words[1], "id": rng.randint(1, 10**8), "ok": True})


def secret(rng: random.Random) -> str:
    """Something that masking finds."""
    digits = "".join(rng.choice("0123456789") for _ in range(7))
    return rng.choice(
        (
            f"Write to {rng.choice(NAMES)}.{rng.choice(WORDS)}{rng.randint(1, 999)}@example.org.",
            f"The key is sk-proj-{rng.getrandbits(96):024x}Ab1.",
            f"Call +49 30 9{digits} today.",
            f"password = {rng.choice(WORDS)}{rng.randint(1000, 9999)}X",
            f"postgres://admin:{rng.getrandbits(40):x}@db.internal/main",
        )
    )


# -- the forms in which an exchange is written


def _choice(message: dict[str, Any], model: str, end: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": end}
    return {"object": "chat.completion", "model": model, "choices": [choice], "usage": {}}


def _chunks(message: dict[str, Any], model: str, end: str) -> list[dict[str, Any]]:
    """The answer as a stream."""
    text = message.get("content") or ""
    half = len(text) // 2
    rest = {k: v for k, v in message.items() if k != "content"}
    if calls := rest.get("tool_calls"):
        rest["tool_calls"] = [{**call, "index": i} for i, call in enumerate(calls)]
    deltas = [{"role": "assistant", **rest}, {"content": text[:half]}, {"content": text[half:]}, {}]
    return [
        {
            "object": "chat.completion.chunk",
            "model": model,
            "choices": [{"index": 0, "delta": d, "finish_reason": None if d else end}],
        }
        for d in deltas
    ]


def _events(chunks: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


Form = Callable[[dict[str, Any], dict[str, Any], str, str, float], dict[str, Any]]
# (request, message, model, why it ended, time) -> the line's object
FORMS: dict[str, Form] = {
    "flat": lambda q, m, model, end, t: {**q, "response": _choice(m, model, end), "time": t},
    "LiteLLM": lambda q, m, model, end, t: {
        "call_type": "acompletion",
        "startTime": t,
        "model_group": model,
        "messages": {"messages": q["messages"]},
        "tools": q.get("tools"),
        "response": _choice(m, model, end),
        "metadata": {"category": "support"},
    },
    "JSON within JSON": lambda q, m, model, end, t: {
        "timestamp": t * 1000,
        "request": json.dumps(q),
        "response": json.dumps(_choice(m, model, end)),
    },
    "bodies": lambda q, m, model, end, t: {
        "req": {"method": "POST", "body": q},
        "res": {"status": 200, "body": {**_choice(m, model, end), "created": int(t)}},
    },
    "batch": lambda q, m, model, end, t: {
        "custom_id": f"r{t}",
        "body": q,
        "response": {"status_code": 200, "body": {**_choice(m, model, end), "created": int(t)}},
        "error": None,
    },
    "chunks": lambda q, m, model, end, t: {
        "request": q,
        "response": _chunks(m, model, end),
        "ts": t,
    },
    "events": lambda q, m, model, end, t: {
        "request": q,
        "response": _events(_chunks(m, model, end)),
        "ts": t,
    },
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "of an order"}}]


class Log:
    """Lines of a log, and how many hold what: `counts` by KINDS, `forms`, `secrets`."""

    def __init__(self, exchanges: int, seed: int = 0, model: str = "tiny", letters: int = 900):
        self.rng, self.model, self.letters = random.Random(seed), model, letters
        self.counts: Counter[str] = Counter()
        self.forms: Counter[str] = Counter()
        self.secrets = 0
        kinds = [kind for kind, share in KINDS.items() for _ in range(exchanges * share // 1000)]
        kinds += ["plain"] * (exchanges - len(kinds))
        self.rng.shuffle(kinds)
        self.lines = [line for n, kind in enumerate(kinds) for line in self._lines(n, kind)]

    @property
    def reasons(self) -> dict[str, int]:
        """Lines that give no row, by what the reader says of them."""
        found = {why: self.counts[kind] for kind, why in REASONS.items() if self.counts[kind]}
        return found

    @property
    def usable(self) -> int:
        """Lines that give a row."""
        return len(self.lines) - sum(self.reasons.values())

    def write(self, path: Path) -> Path:
        path.write_bytes(b"".join(line + b"\n" for line in self.lines))
        return path

    def _lines(self, n: int, kind: str) -> Iterator[bytes]:
        """The line of exchange n; two of a duplicate and of a chat that goes on."""
        self.counts[kind] += 1
        model = self.rng.choice(OTHERS) if kind == "other model" else self.model
        request, message, end = self._exchange(n, kind, model)
        if kind == "Anthropic's form":
            said = {"type": "message", "content": [{"type": "text", "text": "Yes."}]}
            yield json.dumps(
                {"request": {"system": "x", "max_tokens": 9}, "response": said}
            ).encode()
            return
        if kind == "no object":
            yield b"[1, 2]"
            return
        text = self._written(n, request, message, model, end)
        if kind == "failed":
            text = json.dumps({"request": request, "response": {"status_code": 500, "body": None}})
        if kind == "half a surrogate":
            text = text.replace("marked here", "half \\ud83d an emoji")
        if kind == "NaN beside":
            text = text[:-1] + ', "score": NaN}'
        raw = text.encode()
        if kind == "cut line":
            raw = raw[: self.rng.randint(len(raw) // 4, len(raw) - 2)]
        if kind == "not UTF-8":
            raw = raw[:40] + b"\xff\xfe\x80" + raw[40:]
        if kind == "NUL":
            raw = raw[:40] + b"\0" + raw[40:]
        yield raw
        if kind == "duplicate":
            yield self._written(n, request, message, model, end).encode()
        if kind == "went on":
            more = [
                *request["messages"],
                {"role": "assistant", **message},
                {"role": "user", "content": f"And then {n}? " + prose(self.rng, 40)},
            ]
            said = {"content": prose(self.rng, self.letters // 2)}
            yield self._written(n, {**request, "messages": more}, said, model, "stop").encode()

    def _exchange(
        self, n: int, kind: str, model: str
    ) -> tuple[dict[str, Any], dict[str, Any], str]:
        """(request, the assistant's message, why it ended)."""
        rng, letters = self.rng, self.letters
        asked = 16 * letters if kind == "long prompt" else rng.randint(letters // 4, letters // 2)
        question = f"Question {n}: " + prose(rng, asked)
        if rng.random() < 0.05:
            self.secrets += 1
            question += " " + secret(rng)
        if kind == "half a surrogate":
            question += " marked here"
        request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.7,
        }
        message: dict[str, Any] = {"content": prose(rng, rng.randint(letters // 2, letters))}
        end = "stop" if rng.random() < 0.9 else "length"
        if kind in ("tool calls", "NaN in a tool call"):
            value = float("nan") if kind.startswith("NaN") else rng.randint(1, 10**6)
            named = {"name": "look_up", "arguments": json.dumps({"order": value})}
            call = {"id": f"c{n}", "type": "function", "function": named}
            request["tools"] = TOOLS
            message, end = {"content": None, "tool_calls": [call]}, "tool_calls"
        if kind == "reasoning":
            message["reasoning_content"] = prose(rng, letters // 2)
        if kind == "empty answer":
            message["content"] = " "
        if kind == "filtered":
            end = "content_filter"
        return request, message, end

    def _written(
        self, n: int, request: dict[str, Any], message: dict[str, Any], model: str, end: str
    ) -> str:
        form = self.rng.choice(list(FORMS))
        self.forms[form] += 1
        return json.dumps(FORMS[form](request, message, model, end, 1.7e9 + n))


if __name__ == "__main__":
    made = Log(int(sys.argv[2]))
    made.write(Path(sys.argv[1]))
    print(f"{len(made.lines)} lines, {made.usable} usable; {dict(made.counts)}")
