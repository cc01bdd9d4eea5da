"""A server of the OpenAI API that misbehaves by a schedule; started as a process of its own.

    python tests/helpers/unruly_server.py SCHEDULE.json

Prints its port, then serves until it is killed. SCHEDULE: {"model": name, "key": wanted key, "faults": {TEXT: [fault, ...]}, "always": fault, "models": fault of
the list of models, "gather": N, "thinks": how}. The n-th request
whose last user turn is TEXT gets the n-th fault, afterwards a good answer, which depends on the
messages, max_tokens and seed alone. The first N requests are answered when all of them are there.
thinks: before every answer, as Qwen3 does; "inside" leaves the reasoning in the text (no reasoning
parser), "reasoning_content" and "reasoning" keep it apart under that name. With "look" in the
question and tools in the request the answer is a call of the first tool.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS = ("429-wait", "500", "slow", "no-http")  # that pass
SENTENCE = "the rider goes ahead of a slow horse and looks back along road"
WORDS = SENTENCE.split()


def answer_to(body: dict[str, Any]) -> tuple[str, str, int]:
    """(text, finish_reason, tokens): a pure function of the request. One token a byte, and one
    for the end.
    """
    digest = hashlib.sha256(json.dumps([body["messages"], body.get("seed")]).encode()).digest()
    text = " ".join(WORDS[b % len(WORDS)] for b in digest[: 2 + digest[0] % 12])
    return limited(text, body)


def limited(text: str, body: dict[str, Any]) -> tuple[str, str, int]:
    """The same, no longer than max_tokens."""
    limit = body.get("max_tokens", 1 << 20)
    if len(text) > limit:
        return text[:limit], "length", limit
    return text, "stop", len(text) + 1


def thought(body: dict[str, Any], how: str) -> tuple[dict[str, Any], str, int]:
    """(message, finish_reason, tokens) of a model that thinks, and of one that calls a tool."""
    text, _, _ = answer_to({**body, "max_tokens": 1 << 20})
    tools = body.get("tools")
    call = {"name": tools[0]["function"]["name"], "arguments": '{"at": "it"}'} if tools else None
    if call is None or "look" not in body["messages"][-1]["content"]:
        call, said = None, text
    else:
        said = f"<tool_call>{json.dumps(call)}</tool_call>"
    why = f"let me see how {text[::-1]}"
    whole, reason, tokens = limited(f"<think>\n{why}\n</think>\n\n{said}", body)
    if call and reason == "stop":
        notices = {"tool_calls": [{"id": "call-1", "type": "function", "function": call}]}
        return {"content": None, how: f"\n{why}\n", **notices}, "tool_calls", tokens
    if how == "inside":
        return {"content": whole}, reason, tokens
    before, ended, content = whole.removeprefix("<think>").partition("</think>")
    return {how: before, "content": content if ended else None}, reason, tokens


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, schedule: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.schedule, self.lock = schedule, threading.Lock()
        self.faults = {text: list(faults) for text, faults in schedule.get("faults", {}).items()}
        self.gather = threading.Barrier(schedule.get("gather", 1))
        self.waiting = schedule.get("gather", 0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if not self.knows_the_key():
            return None
        if fault := self.server.schedule.get("models"):
            return self.fail(fault)
        listed = {"object": "list", "data": [{"id": self.server.schedule["model"]}]}
        self.reply(200, json.dumps(listed).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.knows_the_key():
            return None
        if self.path != "/v1/chat/completions":
            return self.reply(404, b"not found")
        with self.server.lock:
            first, self.server.waiting = self.server.waiting > 0, self.server.waiting - 1
            faults = self.server.faults.get(body["messages"][-1]["content"], [])
            fault = faults.pop(0) if faults else self.server.schedule.get("always", "")
        try:
            if first:
                self.server.gather.wait(timeout=60)
            self.fail(fault, body) if fault else self.good(body)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def knows_the_key(self) -> bool:
        key = self.server.schedule.get("key")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            said = {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}}
            self.reply(401, json.dumps(said).encode())
            return False
        return True

    def good(self, body: dict[str, Any], **more: Any) -> None:
        self.reply(200, self.completion(body, **more))

    def completion(self, body: dict[str, Any], **more: Any) -> bytes:
        text, reason, tokens = answer_to(body)
        message: dict[str, Any] = {"content": text}
        if how := self.server.schedule.get("thinks"):
            message, reason, tokens = thought(body, how)
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", **message}}
        choice |= {"finish_reason": reason} | more
        if body.get("return_token_ids"):
            choice["token_ids"] = [b + 3 for b in text.encode()] + ([2] if reason == "stop" else [])
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        return json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode()

    def fail(self, fault: str, body: dict[str, Any] | None = None) -> None:
        """Misbehave in one of FAULTS, or refuse for good with a status."""
        if fault == "429-wait":
            return self.reply(429, b'{"error": "later"}', Retry_After="0.3")
        if fault == "garbage":
            return self.reply(200, b"\x00\xff garbage {]")
        if fault == "slow":
            return time.sleep(60)
        if fault == "no-http":
            self.wfile.write(b"hello, who is there?\r\n\r\n")
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if fault in ("tool-call", "no-text", "control"):
            assert body
            message = {
                "tool-call": {"content": "x", "tool_calls": [{}]},
                "no-text": {"content": None},
                "control": {"content": "well <|im_end|> then"},
            }[fault]
            return self.good(body, message={"role": "assistant", **message})
        if fault == "307":
            return self.reply(307, b"", Location="http://127.0.0.1:1/elsewhere")
        self.reply(
            int(fault),
            json.dumps({"error": {"message": f"no: {self.headers.get('Authorization')}"}}).encode(),
        )
        return None


if __name__ == "__main__":
    server = Server(json.loads(Path(sys.argv[1]).read_text()))
    print(server.server_address[1], flush=True)
    server.serve_forever()
