"""Every kind of malformed training row, in one place: name -> (the line, words of its reason)."""

from __future__ import annotations

import json
from typing import Any

from outrider.conf.jsonl import MAX_LINE


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
        0: lambda: b"\xef\xbb\xbf" + chat(*turns),  # a byte order mark, as of joined files
        5: lambda: chat(*turns) + b"\r",
        10: lambda: b"  " + chat(*turns, id=n, source={"a": [1, None]}) + b"\t",
        15: lambda: shared(("system", "be brief"), ("human", f"question {n}"), ("gpt", answer)),
        20: lambda: chat(("user", f"question\u2028{n}\x85"), ("assistant", answer + "\U0001f40e")),
    }
    return forms.get(n % 25, lambda: chat(*turns))()


BAD: dict[str, tuple[bytes, str]] = {
    "cut JSON": (b'{"messages": [{"role": "us', "is not JSON"),
    "single quotes": (b"{'text': 'x'}", "is not JSON"),
    "two objects on a line": (chat(("user", "q")) + chat(("assistant", "a")), "is not JSON"),
    "HTML page": (b"<html><body>error</body></html>", "is not JSON"),
    "list": (b"[1]", "is not an object"),
    "null": (b"null", "is not an object"),
    "not UTF-8": (b'{"text": "\xff\xfe"}', "is not UTF-8"),
    "NUL byte": (b'{"text": "\0"}', "NUL byte"),
    "key twice": (b'{"text": "x", "text": "y"}', "a key twice"),
    "line too long": (b'{"text": "%s"}' % (b"x" * MAX_LINE), "bytes (limit"),
    "nested too deeply": (b'{"text": ' + b"[" * 100000, "is n"),
    "no known key": (b'{"prompt": "x"}', "its keys: prompt"),
    "no turns": (b'{"messages": []}', "none of messages"),
    "turns are text": (b'{"messages": "x"}', "not a list"),
    "turn is text": (b'{"messages": ["x"]}', "turn 0 is not an object"),
    "unknown role": (chat(("user", "q"), ("robot", "a")), "turn 1: unknown role 'robot'"),
    "role is a number": (chat((1, "a")), "unknown role 1"),
    "no content": (b'{"conversations": [{"from": "human"}]}', "content is NoneType"),
    "content is a number": (shared(("human", 3)), "content is int"),
    "an image": (chat(("user", [{"type": "image"}]), ("assistant", "a")), "turn 0 holds image"),
    "content blank": (chat(("user", " \n\t"), ("assistant", "a")), "turn 0: content is empty"),
    "half a surrogate": (chat(("user", "q"), ("assistant", "a\ud800")), "turn 1: holds half of"),
    "NUL character": (chat(("user", "q"), ("assistant", "a\0")), "turn 1: holds a NUL"),
    "assistant first": (chat(("assistant", "a"), ("user", "q")), "turn 0: role 'assistant'"),
    "user twice": (chat(("user", "q"), ("user", "q"), ("assistant", "a")), "turn 1: role 'user'"),
    "system in between": (
        chat(("user", "q"), ("assistant", "a"), ("system", "s")),
        "may only stand",
    ),
    "no assistant": (chat(("system", "s"), ("user", "q")), "no assistant turn"),
    "question fills the length": (
        chat(("user", "long " * 400), ("assistant", "a")),
        "no supervised token within data.max_length",
    ),
    "text is a number": (b'{"text": 3}', "none of messages"),
    "text blank": (b'{"text": " "}', "text is empty"),
}
