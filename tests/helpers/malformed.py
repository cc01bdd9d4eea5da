"""Every kind of malformed training row that is tested, in one place: name -> (the line, n-th
of its kind; words of the reason that must be reported). THIRTY are the kinds of the campaign,
FURTHER ones are tested once each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from outrider.conf.jsonl import MAX_LINE

Kind = tuple[Callable[[int], bytes], str]


def chat(*turns: tuple[Any, Any], **more: Any) -> bytes:
    """A row of (role, content) turns."""
    return json.dumps(
        {"messages": [{"role": role, "content": content} for role, content in turns], **more}
    ).encode()


def shared(*turns: tuple[Any, Any]) -> bytes:
    """The same in ShareGPT's keys."""
    return json.dumps(
        {"conversations": [{"from": role, "value": content} for role, content in turns]}
    ).encode()


def good(n: int) -> bytes:
    """A sound row, one in five of them in an unusual but sound form."""
    answer = " ".join(["the", "rider", "goes", "ahead", "of", "a", "slow", "horse"][: 2 + n % 7])
    turns = [("user", f"question {n}"), ("assistant", answer)]
    forms = {
        0: lambda: (
            b"\xef\xbb\xbf" + chat(*turns)
        ),  # a byte order mark, as files have that were put together
        5: lambda: chat(*turns) + b"\r",  # ends with CRLF
        10: lambda: (
            b"  " + chat(*turns, id=n, source={"a": [1, None]}) + b"\t"
        ),  # other keys, white space around
        15: lambda: shared(("system", "be brief"), ("human", f"question {n}"), ("gpt", answer)),
        20: lambda: chat(
            ("user", f"question\u2028{n}\x85"), ("assistant", answer + " \U0001f40e")
        ),  # odd line ends
    }
    return forms.get(n % 25, lambda: chat(*turns))()


THIRTY: dict[str, Kind] = {
    "cut JSON": (lambda n: b'{"messages": [{"role": "us' + b"e" * (n % 3), "is not JSON"),
    "trailing comma": (lambda n: b'{"text": "%d",}' % n, "is not JSON"),
    "single quotes": (lambda n: b"{'text': '%d'}" % n, "is not JSON"),
    "two objects on a line": (
        lambda n: chat(("user", "q")) + chat(("assistant", str(n))),
        "is not JSON",
    ),
    "HTML page": (lambda n: b"<html><body>error %d</body></html>" % n, "is not JSON"),
    "list": (lambda n: b"[%d]" % n, "is not an object"),
    "not UTF-8": (lambda n: b'{"text": "\xff\xfe %d"}' % n, "is not UTF-8"),
    "NUL byte": (lambda n: b'{"text": "\0%d"}' % n, "NUL byte"),
    "UTF-16": (lambda n: json.dumps({"text": str(n)}).encode("utf-16-le"), "NUL byte"),
    "key twice": (lambda n: b'{"text": "%d", "text": "y"}' % n, "a key twice"),
    "line too long": (lambda n: b'{"text": "%d%s"}' % (n, b"x" * MAX_LINE), "bytes (limit"),
    "nested too deeply": (lambda n: b'{"text": ' + b"[" * 100000, "is n"),
    "no known key": (
        lambda n: b'{"prompt": "%d"}' % n,
        "none of messages, conversations, request with response, text; its keys: prompt",
    ),
    "no turns": (lambda n: b'{"messages": [], "id": %d}' % n, "none of messages"),
    "turns are text": (lambda n: b'{"messages": "%d"}' % n, "not a list"),
    "turn is text": (lambda n: b'{"messages": ["%d"]}' % n, "turn 0 is not an object"),
    "unknown role": (
        lambda n: chat(("user", "q"), ("robot", str(n))),
        "turn 1: unknown role 'robot'",
    ),
    "no role": (lambda n: b'{"messages": [{"content": "%d"}]}' % n, "unknown role None"),
    "content null": (
        lambda n: chat(("user", str(n)), ("assistant", None)),
        "turn 1: content is NoneType",
    ),
    "content list": (
        lambda n: chat(("user", [{"type": "image", "url": str(n)}]), ("assistant", "a")),
        "turn 0: content holds a part that is 'image', not text",
    ),
    "content empty": (
        lambda n: chat(("user", str(n)), ("assistant", "")),
        "turn 1: content is empty",
    ),
    "content blank": (
        lambda n: chat(("user", " \n\t"), ("assistant", str(n))),
        "turn 0: content is empty",
    ),
    "half a surrogate": (
        lambda n: chat(("user", str(n)), ("assistant", "a\ud800")),
        "turn 1: holds half of",
    ),
    "NUL character": (
        lambda n: chat(("user", str(n)), ("assistant", "a\0")),
        "turn 1: holds a NUL",
    ),
    "assistant first": (
        lambda n: chat(("assistant", str(n)), ("user", "q")),
        "role 'assistant' where 'user' is due",
    ),
    "user twice": (
        lambda n: chat(("user", "q"), ("user", str(n)), ("assistant", "a")),
        "turn 1: role 'user'",
    ),
    "system in between": (
        lambda n: chat(("user", "q"), ("assistant", "a"), ("system", str(n))),
        "may only stand",
    ),
    "no assistant": (lambda n: chat(("system", "s"), ("user", str(n))), "no assistant turn"),
    "question fills the length": (
        lambda n: chat(("user", f"{n} " + "long " * 400), ("assistant", "a")),
        "no supervised token within data.max_length",
    ),
    "text blank": (lambda n: b'{"text": " ", "id": %d}' % n, "text is empty"),
}

FURTHER: dict[str, Kind] = {
    "number": (lambda n: b"3", "is not an object"),
    "null": (lambda n: b"null", "is not an object"),
    "bare word": (lambda n: b"nul", "is not JSON"),
    "empty object": (lambda n: b"{}", "its keys: none"),
    "CSV": (lambda n: b"user,assistant", "is not JSON"),
    "text is a number": (lambda n: b'{"text": 3}', "none of messages"),
    "text NaN": (lambda n: b'{"text": NaN}', "none of messages"),
    "text with half a surrogate": (lambda n: b'{"text": "\\ud800"}', "surrogate"),
    "turns are an object": (lambda n: b'{"messages": {"a": 1}}', "not a list"),
    "turn is a number": (lambda n: b'{"messages": [3]}', "turn 0 is not an object"),
    "turn is null": (lambda n: b'{"messages": [null]}', "turn 0 is not an object"),
    "role is a number": (lambda n: chat((1, "a")), "unknown role 1"),
    "content is a number": (lambda n: shared(("human", 3)), "content is int"),
    "ShareGPT assistant first": (lambda n: shared(("gpt", "a")), "turn 0: role 'assistant'"),
    "ShareGPT unknown role": (
        lambda n: shared(("human", "q"), ("narrator", "a")),
        "unknown role 'narrator'",
    ),
    "ShareGPT without value": (
        lambda n: b'{"conversations": [{"from": "human"}]}',
        "content is NoneType",
    ),
    "answer to the system": (
        lambda n: chat(("system", "s"), ("assistant", "a")),
        "role 'assistant' where 'user'",
    ),
    "user and assistant empty": (
        lambda n: chat(("user", ""), ("assistant", "")),
        "turn 0: content is empty",
    ),
}
